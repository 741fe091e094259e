"""Studies of training: their cases, their measurement, and their part of a report."""
