"""GPUs: memory, kernels, streams, what MPI and other ranks can reach of them."""
