"""Run the blocks of pages on the ranks of one job, which saves seconds for each start of ranks.

mpiexec -n 4 python -m mpi4py typed_ranks.py FOLDER waits for the files 0.json, 1.json, ... and carries out each as a
request, until N.end exists.  Rank R writes its output for request N to N.R.out.  A request has the names `page` (Python
blocks of a page share their variables), `folder`, and one of

    block      the text of a Python block
    command    the words behind `pdgemm`
    script     the words behind `python -m pdgemm`
"""

import doctest
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import chdir, redirect_stdout
from itertools import count
from pathlib import Path
from traceback import format_exception_only
from typing import Any
from unittest import mock

import in_process
from mpi4py import MPI
from mpi4py.run import run_command_line


def session(source: str, names: dict[str, Any]) -> str:
    """Run examples that begin with `>>>`; return the examples with their output."""
    transcript = ""
    for example in doctest.DocTestParser().get_examples(source):
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                exec(compile(example.source, "<page>", "single"), names)
        except Exception as error:
            printed.write("Traceback (most recent call last):\n    ...\n" + format_exception_only(error)[-1])
        first, *others = example.source.splitlines()
        transcript += "\n".join([f">>> {first}", *(f"... {line}" for line in others), printed.getvalue()])
    return transcript


def block(source: str, names: dict[str, Any]) -> str:
    """Run a block of a page; return its output."""
    if source.startswith(">>>"):
        return session(source, names)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(source, "<page>", "exec"), names)
    return printed.getvalue()


def typed(words: Sequence[str], script: bool) -> str:
    """Run a command or a script, check that it succeeds, and return its output."""
    with in_process.one_output() as printed, mock.patch.dict(os.environ, {"COLUMNS": "160"}):
        if script:
            with mock.patch.object(sys, "argv", [*sys.argv]), mock.patch.object(sys, "path", [*sys.path]):
                run_command_line([*words])
        else:
            code = in_process.call(words)
            assert code == 0, f"exit code {code}: {printed()}"
        return printed()


def main(folder: Path) -> None:
    rank, page = MPI.COMM_WORLD.rank, ""
    names = dict[str, Any]()
    for number in count():
        file = folder / f"{number}.json"
        while not file.exists():
            if (folder / f"{number}.end").exists():
                return
            time.sleep(0.02)  # waiting in MPI would occupy the processor
        request = json.loads(file.read_text())
        if page != request["page"]:
            page, names = request["page"], {"__name__": "__main__"}
        with chdir(request["folder"]):
            if "block" in request:
                printed = block(request["block"], names)
            else:
                script = "script" in request
                printed = typed(request["script" if script else "command"], script)
        unfinished = folder / f"{number}.{rank}.new"
        unfinished.write_text(printed)
        unfinished.rename(folder / f"{number}.{rank}.out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
