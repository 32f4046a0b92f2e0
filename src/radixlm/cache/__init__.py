"""Who owns which page: bookkeeping in integers, no torch."""
