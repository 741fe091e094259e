"""Process grids and the arithmetic of block-cyclic layouts."""
