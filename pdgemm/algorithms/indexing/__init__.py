"""Rows, columns and elements by a key, copied in any order and assigned (`selection`); rows by group (`routing`)."""
