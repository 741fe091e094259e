"""Run a script, or a module (-m NAME), on CuPy without a GPU: python tests/helpers/rehearse.py SCRIPT ARGS..."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from fake_cupy import fake_cupy


def main() -> None:
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent)]

    module = sys.argv[1] == "-m"
    sys.argv[:] = sys.argv[2:] if module else sys.argv[1:]
    with fake_cupy():
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
