"""Runs the Python blocks of a page on the ranks of one job: each as soon as its file N.py is there, until N.end is.

mpiexec -n 4 python -m mpi4py typed_ranks.py FOLDER; what rank R prints in block N goes to the file N.R.out.
"""

import doctest
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path
from traceback import format_exception_only
from typing import Any

from mpi4py import MPI


def session(source: str, names: dict[str, Any]) -> str:
    """Run examples that begin with `>>>`, and return them as they look with what they print."""
    transcript = ""
    for example in doctest.DocTestParser().get_examples(source):
        printed = StringIO()
        try:
            with redirect_stdout(printed):
                exec(compile(example.source, "<page>", "single"), names)
        except Exception as error:
            printed.write("Traceback (most recent call last):\n    ...\n" + format_exception_only(error)[-1])
        first, *others = example.source.splitlines()
        transcript += "\n".join([f">>> {first}", *(f"... {line}" for line in others), printed.getvalue()])
    return transcript


def script(source: str, path: Path, names: dict[str, Any]) -> str:
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(source, path, "exec"), names)
    return printed.getvalue()


def main(folder: Path) -> None:
    rank = MPI.COMM_WORLD.rank
    names: dict[str, Any] = {"__name__": "__main__"}
    for number in count():
        block = folder / f"{number}.py"
        while not block.exists():
            if (folder / f"{number}.end").exists():
                return
            time.sleep(0.02)  # and not in MPI, where waiting takes the processor
        source = block.read_text()
        printed = session(source, names) if source.startswith(">>>") else script(source, block, names)
        unfinished = folder / f"{number}.{rank}.new"
        unfinished.write_text(printed)
        unfinished.rename(folder / f"{number}.{rank}.out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
