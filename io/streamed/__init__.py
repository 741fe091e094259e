"""Products of matrices that stay in files: tiles of C are in memory, panels of A and B are read for them.

`tiling` says as a value which tiles and panels are in memory and when each is read, `file_panels` reads and writes
them in threads of their own, `files_product` is the loop, `multiply_files` the whole way from files to a file, and
`stored_matrix` the operand of `pdgemm()`.  `checkpoints` saves what is done of a product, `unfinished` reads what an
earlier job left, and `earlier_ranks` waits for ranks of that job which still run.  Imports `io` and everything below
it.
"""
