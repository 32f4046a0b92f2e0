"""Model files without torch: where they are, what they say about the model, GGUF."""
