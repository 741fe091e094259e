"""Products whose results are compared with checksums, and repeated if a bit has flipped."""
