"""Runs the examples in the docstrings of the package on the ranks of this job; rank 0 prints how many there are.

mpiexec -n 4 python -m mpi4py docstrings.py; a wrong one is shown, and the exit code is 1.
"""

import doctest
import pkgutil
from importlib import import_module

from mpi4py import MPI

import pdgemm
import pdgemm.grids
import pdgemm.io


def main() -> None:
    comm = MPI.COMM_WORLD
    packages = [(pdgemm.__path__, "pdgemm."), (pdgemm.grids.__path__, "pdgemm.grids."), (pdgemm.io.__path__, "pdgemm.io.")]
    names = {module.name for path, prefix in packages for module in pkgutil.walk_packages(path, prefix)}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for name in ["pdgemm", *sorted(names - {"pdgemm.__main__"})]:
        try:
            module = import_module(name)
        except ImportError:  # of an optional package, such as CuPy
            continue
        for examples in doctest.DocTestFinder(exclude_empty=True).find(module):
            runner.run(examples, out=said.append)
    result = runner.summarize(verbose=False)
    failed = comm.allreduce(result.failed)
    if comm.rank == 0:
        print(f"{result.attempted} examples", *said)
    if failed:
        raise SystemExit("".join(said) or "another rank failed")


if __name__ == "__main__":
    main()
