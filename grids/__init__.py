"""Process grids and the arithmetic of block-cyclic layouts.

`distribution` computes owners and local indices, and `index_map` maps local indices between layouts, slices included;
`layout` describes a matrix without its elements; `rectangles` checks that blocks partition a matrix.  `process_grid`
builds the Cartesian (torus) communicators of grid rows, grid columns and depths.  `node_memory` and `shared_heap`
allocate memory that the ranks of a node share; `planned_grid` is a grid whose matrices have no elements.  Imports
`support`, `local` and `errors`.
"""
