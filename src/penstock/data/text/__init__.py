"""Text: documents and rows of files, datasets and the package; tokenizers; packs of tokens; samples of them."""
