"""The ways of the panels of factorisations: read in place or sent, gathered to one rank, added up in trees."""
