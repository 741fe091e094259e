"""Products of matrices that stay in files: tiles of C are in memory, and panels of A and B are read for each tile.

`tiling` is a value that says which tiles and panels are in memory and when each panel is read, `file_panels` reads and
writes in threads, `files_product` is the loop over tiles and panels, `multiply_files` the whole computation from files
to a file, and `stored_matrix` the operand of `pdgemm()`.  `checkpoints` saves the state of a product, and
`unfinished` manages the files in which a job leaves an unfinished product.  `svd_plan` and `stored_svd` compute
singular values of a matrix in a file.  The folder imports `io` and everything below it.
"""
