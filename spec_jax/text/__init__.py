"""Text input and output: files, data sets, tokenizers, batches, and metrics of an output."""
