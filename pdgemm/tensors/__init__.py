"""Tensors: distributed arrays of any number of dimensions, each of which is a matrix and a reading of it.

`dist_tensor` has the class; `tensor_base` the exchange between two layouts; `tensor_functions` NumPy's functions;
`einsum` contractions, in the order and the layouts that `pdgemm.planning.tensors.contractions` chooses.
"""
