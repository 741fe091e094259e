"""Rows, columns and elements by a key: copied in any order (`selection`), and assigned (`assignment`)."""
