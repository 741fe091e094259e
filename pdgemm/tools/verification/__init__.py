"""`pdgemm verify-training` and `record`: other training programs beside one process of plain torch, without MPI.

`pdgemm hpl`: the systems of HPL and HPL-MxP, and their check of the residual.
"""
