"""Training data: text or conversations are tokenised once into a cached token file and read as fixed rows.

sources.find_sources      paths from the user     -> files documents.read_documents  a file                  ->
documents -> chunked_tokenize.TextSplitter -> pieces of text conversations, loss_mask  lines of JSON           -> ids
with a loss mask; packing.RowMaker -> rows prepare.prepare_tokens    pieces, tokenizer       -> tokenfile.TokenFile (ids
read on demand) rows.RowReader            ids, DataState          -> Batch, each with the state to resume from
"""
