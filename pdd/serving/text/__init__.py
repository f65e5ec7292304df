"""Text on both sides of token ids: chat template, tokenizer, incremental detokeniser, stop strings."""
