"""Tools around products: the command line, scaling studies, profiles, and the measurement of a machine.

A program that multiplies matrices imports only one of these modules, that of `trace`.
"""
