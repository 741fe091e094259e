"""The algorithms, each of which reads like its paper, and the redistribution that they need."""
