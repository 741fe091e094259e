"""Factorisations and what is solved with them: arguments are checked, matrices laid out, and panel algorithms run."""
