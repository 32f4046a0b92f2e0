"""Operations of a model, one file per family of ops: a torch reference beside each faster variant."""
