"""GPUs: their memory, kernels and streams, and how MPI and other ranks access their memory.

`cuda` and `kernels` are CuPy and cuBLAS, `cuda_ipc` and `cuda_nccl` reach other ranks' memory, `gpu_binding` chooses
a rank's GPU, `gpu_aware_mpi` finds out whether MPI takes its pointers, and `streams` has one stream for products, one
for copies and one for uploads.  The only folder that imports CuPy; otherwise it imports `instrument`, `grids`,
`support` and `local`.
"""
