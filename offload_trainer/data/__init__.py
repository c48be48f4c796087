"""Training data: text or conversations become a cached token file, or a stream of ids, and are read as fixed rows.

run_data.prepare_data finds the files (sources), reads (documents) and tokenises them (packing, loss_mask) into token
files (tokenfile), or opens a stream; rows.RowReader makes batches of both.
"""
