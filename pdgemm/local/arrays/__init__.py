"""Elements and arrays, wherever they lie.

`dtypes` has the element types and the type in which products are added up, `device` the protocol of a device and
whose an array is, `elementwise` Y := alpha op(X) + beta Y on one rank, `element_functions` elements as functions of
their indices (random numbers, hashes), `folds` the reductions of a rank's part, `integers` and `keys` what users pass
as numbers and as A[key], and `workspace` buffers whose memory is kept for the next product.
"""
