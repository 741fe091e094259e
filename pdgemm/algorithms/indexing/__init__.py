"""Rows, columns and elements that a key names: picked in any order (`selection`), and assigned (`assignment`)."""
