"""What the processes say to each other: typed messages, their bytes, and the links that carry them."""
