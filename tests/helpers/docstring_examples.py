"""Run the examples in the docstrings of the package on the ranks of this job; rank 0 prints their number.

mpiexec -n 4 python -m mpi4py docstring_examples.py; if an example fails, it is printed, and the exit code is 1.
"""

import doctest
from importlib import import_module
from pathlib import Path

from mpi4py import MPI

CHECKOUT = Path(__file__).parents[2]


def modules() -> list[str]:
    """Return the modules whose docstrings have examples."""
    folders = {"pdgemm": "pdgemm", "grids": "pdgemm.grids", "io": "pdgemm.io"}
    found = set()
    for folder, package in folders.items():
        for path in (CHECKOUT / folder).rglob("*.py"):
            if ">>> " in path.read_text():
                parts = path.relative_to(CHECKOUT / folder).with_suffix("").parts
                found.add(".".join([package, *parts]).removesuffix(".__init__"))
    return sorted(found)


def main() -> None:
    comm = MPI.COMM_WORLD
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for name in modules():
        for examples in doctest.DocTestFinder(exclude_empty=True).find(import_module(name)):
            runner.run(examples, out=said.append)
    result = runner.summarize(verbose=False)
    failed = comm.allreduce(result.failed)
    if comm.rank == 0:
        print(f"{result.attempted} examples")
    if failed:
        raise SystemExit("".join(said) or "another rank failed")


if __name__ == "__main__":
    main()
