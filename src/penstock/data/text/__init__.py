"""Text: documents and rows of files and data sets, tokenizers, packs of tokens, and samples made from packs."""
