"""Text and tokens: tokenizer, chat template, incremental detokenizing, stop strings."""
