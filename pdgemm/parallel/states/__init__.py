"""What is kept of a training run in files: the state from which it goes on, and parameters for other programs."""
