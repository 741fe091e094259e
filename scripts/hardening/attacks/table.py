"""The attacks of hostile.py, by name; the part before the dot is the kind."""

from __future__ import annotations

from functools import partial

from attacks import commands, damage, files, processes, restart, training
from attacks.trial import Attack, Trial

CASES = {  # the family of attacks/ranks.py, the number of cases, and a description
    "damage.state": ("state", 40, "A bit is flipped in a file of `save_all`, which the ranks load and save again."),
    "arguments.calls": ("deviate", 60, "One rank, or all, call the library's functions with other arguments."),
    "products.keys": ("keyed", 300, "A[key] and A[key] = value are compared with NumPy."),
    "products.flips": ("flip", 60, "Products with `protect=`, undisturbed and with a flipped bit."),
}
COMMANDS: dict[str, Attack] = {
    "kills.command": processes.command,
    "stopped.programs": processes.stopped,
    "restart.multiply": restart.multiply,
    "restart.inputs": restart.inputs,
    "restart.save_all": restart.save_all,
    "survivors.products": processes.survivors,
    "damage.json": damage.json_files,
    "damage.hdf5": damage.hdf5_files,
    "damage.command": damage.during_a_command,
    "arguments.lines": commands.lines,
    "memory.scarce": commands.scarce,
    "files.odd": files.odd_files,
    "training.exceptions": training.exceptions,
    "products.command": commands.random_options,
}
ATTACKS = COMMANDS | {x: partial(Trial.cases, family=family, count=n) for x, (family, n, _) in CASES.items()}
TEXTS = {name: attack.__doc__ or "" for name, attack in COMMANDS.items()} | {x: text for x, (*_, text) in CASES.items()}
