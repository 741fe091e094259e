"""Programs that continue with fewer ranks when a rank is killed.

`survivors` runs a program in steps, each of which takes effect on all ranks or on none; `kept_state` reads the matrices
of a killed rank from the shared memory of its node.
"""
