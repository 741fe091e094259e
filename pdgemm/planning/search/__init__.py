"""The candidates for a product: grids, algorithms and layouts, and the table that compares them."""
