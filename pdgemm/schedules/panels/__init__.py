"""Panel algorithms as values: what all ranks factor, send and multiply at each step."""
