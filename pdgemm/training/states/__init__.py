"""States of a run: whole parameters and the state of the optimizer, in files and as torch's mappings."""
