"""A program that goes on with fewer ranks when one of them is killed.

`survivors` runs a program in steps, each of which counts on all ranks or on none; `kept_state` reads the matrices of
a killed rank in the memory of its node.
"""
