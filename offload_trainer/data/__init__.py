"""Training data: text or conversations are tokenised once into a cached token file and read as fixed rows.

sources.find_sources           paths from the user           -> files
documents                      a file, plain or compressed   -> documents (blocks of text) or records (objects)
conversations, loss_mask       a record                      -> messages -> ids with a loss mask
packing                        documents                     -> ids
                               ids with a loss mask          -> rows, one or several conversations in each
stream.StreamedTokens          a streamed data set           -> ids or rows, tokenised while the run reads them
run_data.prepare_tokens        all of the above              -> tokenfile.TokenFile in the cache, ids read on demand
run_data.prepare_data          the data section             -> the token files of a run, split into rows
rows.joined, rows.mixed        token files                   -> one, one after the other or mixed by weights
rows.RowReader                 token files and a position    -> Batch, each with the position after it
"""
