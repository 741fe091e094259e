"""Operations on matrices that communicate: products, panel algorithms, redistribution, indexing and statistics.

The operands and options of a product are in `product_options`, its buffers in `plan_workspace`, its runs and reports in
`prepared`.  `redistribution` copies a matrix to another layout, `blocks` makes a matrix from rectangular blocks of the
ranks and the reverse, and `planned_program` runs a function on matrices without elements and returns its stages.
Imports `planning`, `matrix`, `transport`, `devices` and the imports of these.
"""
