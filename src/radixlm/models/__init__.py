"""Model families: what a checkpoint's tensors mean and how a token's hidden state is computed."""
