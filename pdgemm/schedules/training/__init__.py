"""Training on several ranks as values: the mesh, pipelines, the positions of ranks, and shards of parameters."""
