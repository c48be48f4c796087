"""Text to training rows: documents -> tokens, once, in a cached token file -> fixed rows in a seeded order.

sources.find_sources     paths the user gave   -> files
documents.read_documents a file                -> documents -> pieces.Cutter -> pieces of text
conversations, answers   lines of JSON         -> ids, and which of them are learned; marked_rows.RowMaker -> rows
prepare.prepare_tokens   pieces, tokenizer     -> tokenfile.TokenFile (memory-mapped ids)
rows.RowReader           ids, DataState        -> Batch, each with the state to resume from
"""
