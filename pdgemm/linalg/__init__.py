"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

__all__: list[str] = []
