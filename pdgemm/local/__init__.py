"""What one rank computes, alone: arrays and their elements, and the BLAS and LAPACK that multiply and factor them."""
