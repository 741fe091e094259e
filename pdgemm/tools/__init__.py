"""The command line, scaling studies, profiles, the measurement of a machine, and checks of training programs.

Of these modules, a program that multiplies matrices imports only `profiling.trace_file`, and only if it calls `trace`.
"""
