"""Elements and arrays, in host memory or on a device.

`dtypes` has the element types and the type in which products are added up, `device` the protocol of a device and the
device of an array, `alignment` the distance of rows on a device, `elementwise` Y := alpha op(X) + beta Y and NumPy's
functions on one rank, `element_functions` elements as functions of their indices (random numbers, hashes), `folds` the
reductions of a rank's part, `arguments` and `keys` the checks of numbers and of keys in A[key] that users pass, and
`workspace` buffers whose memory is cached for the next product.
"""
