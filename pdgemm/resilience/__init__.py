"""A program that goes on with fewer ranks when one of them is killed."""
