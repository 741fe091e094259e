"""Measurements of a run: seconds, words and messages, as totals and as spans of a trace."""
