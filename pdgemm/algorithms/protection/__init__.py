"""Products whose results are compared with checksums, and repeated where a bit has flipped.

`row_checksums` compares C with sums of its rows that are computed from A and B before the product, `repetition`
repeats the product where they differ, and `checksum` is the exact checksum of all elements, for files and
redistributed matrices.  It knows no algorithm, and imports `matrix` and what stands below it.
"""
