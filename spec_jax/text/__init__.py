"""Text in and out: files, data sets, tokenizers, batches, and how good an output is."""
