"""The time of a schedule on a machine: parameters of a machine, formulas for one rank, and a simulator of all ranks."""
