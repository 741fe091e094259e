"""Training on several ranks as values: the mesh of ranks; the storage of parameters, gradients and optimizer state."""
