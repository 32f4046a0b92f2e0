"""HTTP: what people's clients speak."""
