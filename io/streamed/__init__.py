"""Products of matrices that do not fit the memory: tiles of C stay, panels of A and B are read from files."""
