"""What is done with matrices by messages: products, panel algorithms, redistribution, and what stands on them.

A product's operands and options are in `product_options`, its buffers in `plan_workspace`, its runs in `prepared` and
`last_runs`, its report in `product_report`; `redistribution` brings a matrix to another layout, `blocks` a matrix
from and to rectangles that ranks have, and `planned_program` calls a function on matrices without elements and
returns its stages.  Imports `planning`, `matrix`, `transport`, `devices` and what these import.
"""
