"""Matrices of 8-bit numbers with scales: `scaled_matrix` multiplies and moves them, `quantization` makes them."""
