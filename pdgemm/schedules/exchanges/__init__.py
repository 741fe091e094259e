"""Redistributions as values: what every rank sends to every other.

`exchange` is any layout to any layout and, with listed indices, rows and columns in any order; `rectangle_exchange`
is between a layout and rectangles that ranks have, `inherited_exchange` from the arrays of a grid some of whose ranks
are gone.
"""
