"""Products whose results are compared with checksums, and repeated if a bit has flipped.

`row_checksums` compares the row sums of C with sums that are computed from A and B before the product; `checksum`
repeats the product if these sums differ, and has the exact checksum of all elements, for files and redistributed
matrices.  The folder does not depend on algorithms: it imports `matrix` and the folders below `matrix`.
"""
