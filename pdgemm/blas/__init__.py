"""The local product: which library multiplies, with how many threads, and the only calls of it."""
