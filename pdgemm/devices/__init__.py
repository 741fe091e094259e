"""GPUs: their memory, kernels and streams, and how MPI and other ranks access GPU memory.

`cuda`, `kernels` and `generators` call CuPy and cuBLAS, `cusolver` cuSOLVER, `cuda_ipc` and `cuda_nccl` access the
memory of other ranks, `gpu_binding` chooses the GPU of a rank, `gpu_aware_mpi` tests whether MPI accepts device
pointers, and `streams` has one stream for products, one for copies and one for uploads.  This is the only folder that
imports CuPy; otherwise it imports `instrument`, `grids`, `support` and `local`.
"""
