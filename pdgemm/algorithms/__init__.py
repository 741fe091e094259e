"""The algorithms, each written as in its paper, and the redistribution that they need."""
