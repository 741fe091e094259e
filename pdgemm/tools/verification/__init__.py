"""`pdgemm verify-training` and `record`: other training programs beside one process of plain torch.  No MPI."""
