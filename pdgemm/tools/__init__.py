"""Tools around products: the command line, scaling studies, profiles, and the measurement of a machine.

Of these modules, a program that multiplies matrices imports only `profiling.trace_file`, and only if it calls `trace`.
"""
