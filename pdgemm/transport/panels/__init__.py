"""The ways of panels: read in place or sent, gathered to one rank and brought back, summed up in trees."""
