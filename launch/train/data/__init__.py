"""The data of `dhelix train`: documents, tokenizers, rows of documents, and batches."""
