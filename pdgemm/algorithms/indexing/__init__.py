"""Indexing: rows, columns and elements are copied or assigned (`selection`); rows are sent by group (`routing`)."""
