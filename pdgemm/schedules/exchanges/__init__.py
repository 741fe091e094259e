"""Redistributions between any two layouts as values: between layouts, out of inherited arrays, and from rectangles."""
