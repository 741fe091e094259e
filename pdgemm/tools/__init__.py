"""Tools that run beside products: the command line, scaling studies, profiles, and the measurement of a machine.

A program that multiplies matrices imports none of these modules, except that of `trace`.
"""
