"""Panel algorithms on one rank: a panel is factored, travels, and updates what is left of the matrix."""
