"""How long a schedule takes on a machine: the machine as a few numbers, formulas, and the simulator of all ranks."""
