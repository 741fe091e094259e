"""GPUs: their memory, kernels and streams, and how MPI and other ranks access their memory."""
