"""Parts of tensors that keys name, and functions whose elements change places: sorts, searches, cumulative sums.

`tensor_keys` parses keys, `tensor_indexing` reads and sets parts. `tensor_lines` deals rows out to ranks that only the
senders know; `tensor_sorting`, `tensor_axes` and `tensor_copies` have functions with NumPy's names.
"""
