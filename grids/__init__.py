"""Process grids and the arithmetic of block-cyclic layouts.

`distribution` and `index_map` are the index arithmetic of one dimension, closed under slicing; `layout` is that of a
matrix, `rectangles` says whether pieces are all of a matrix, `process_grid` builds the Cartesian and torus
communicators, `line_communicators` those of rows, columns and layers, `node_memory` and `shared_heap` the memory that
the ranks of a node share, and `planned_grid` a grid whose matrices have no elements.  Imports `support`, `local` and
`errors`.
"""
