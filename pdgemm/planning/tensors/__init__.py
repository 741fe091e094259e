"""Plans of contractions of tensors: expressions, the order of their contractions, layouts, and what moves."""
