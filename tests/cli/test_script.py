"""`python -m pdgemm script.py` runs a script, prints an error once, and ends all ranks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest
from click.testing import CliRunner
from tiers import thorough

from pdgemm.support.watchdog import CODE
from pdgemm.tools.cli import script
from pdgemm.tools.cli.commands import cli
from pdgemm.tools.cli.script import traceback_text

needs_mpiexec = [jobs.needs_mpiexec, pytest.mark.timeout(100)]
BEGINNING, STRING = "Traceback (most recent call last):\n", '  File "<string>", line 1, in <module>\n'
GONE = "No such file or directory: '{cwd}/gone.py'"
NOISE = ("MPI_ABORT", "prterun", "[warn]", "PMIX ERROR")  # launchers' lines about exit codes


def run(ranks: int, folder: Path, source: str, *words: str) -> SimpleNamespace:
    """Run the program; return exit code, standard output, and standard error without the launcher's lines."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(source))
    done = jobs.run(jobs.python(ranks, "-m", "pdgemm", *words, "program.py"), cwd=folder, timeout=90)
    lines, launcher = [], False
    for line in done.stderr.replace("\0", "").splitlines():
        launcher ^= line.startswith("-----")
        if line.strip() and not launcher and not line.startswith("-----") and not any(x in line for x in NOISE):
            lines.append(line)
    return SimpleNamespace(code=done.returncode, out=done.stdout.split(), lines=lines, err=done.stderr)


# ---------------------------------------------------------------- on ranks
class TestOnRanks:
    pytestmark = needs_mpiexec

    def test_a_wrong_shape_is_told_once(self, tmp_path: Path) -> None:
        source = """
            from pdgemm import DistMatrix, ProcessGrid
            A = DistMatrix.random((60, 50), grid=ProcessGrid())
            C = A @ A
            """
        done = run(2, tmp_path, source)
        assert done.code == 1 and done.out == []
        assert [x for x in done.lines if "^" not in x] == [
            "All 2 ranks raised LayoutError:",
            "Traceback (most recent call last):",
            '  File "program.py", line 4, in <module>',
            "    C = A @ A",
            "pdgemm.errors.LayoutError: inner dimensions do not agree: "
            "op(A) is 60 x 50 on a 1 x 2 grid, op(B) is 60 x 50 on a 1 x 2 grid",
        ]

    def test_a_rank_that_fails_alone_ends_the_job(self, tmp_path: Path) -> None:
        source = """
            from mpi4py import MPI
            from pdgemm import DistMatrix, ProcessGrid
            grid = ProcessGrid(MPI.COMM_WORLD)
            print("before")
            A = DistMatrix.eye(4, grid=grid)
            try:
                A @ DistMatrix.eye(5, grid=grid)        # raised on all ranks, and caught
            except ValueError as bad:
                if grid.rank == 1:
                    raise KeyError("mine")
            A.norm()
            """
        done = run(3, tmp_path, source)
        assert done.code not in (0, CODE)
        assert done.lines[0] == "Rank 1 of 3 raised KeyError:"
        assert done.lines[-3:] == [
            '  File "program.py", line 11, in <module>',
            '    raise KeyError("mine")',
            "KeyError: 'mine'",
        ]
        assert any(x.startswith("pdgemm.errors.LayoutError: inner dimensions do not agree: op(") for x in done.lines)
        assert "before" in done.out and sys.prefix not in done.err

    def test_one_rank_prints_if_several_fail(self, tmp_path: Path) -> None:
        """An exception in a callback on rank 3 is raised on all ranks, which then exit in different ways."""
        source = """
            import sys
            from mpi4py import MPI
            from pdgemm import DistMatrix, ProcessGrid
            from pdgemm.tools.cli import script
            script.HEAD_START = 5.0  # ranks of a busy machine fail some seconds apart
            grid = ProcessGrid(MPI.COMM_WORLD)

            def f(i, j):
                return {}[i.size] if grid.rank == 3 else 0 * (i + j)

            try:
                DistMatrix.from_function(f, (8, 8), grid=grid)
            except KeyError as bad:
                error = bad
            if grid.rank == 1:
                sys.exit("enough")
            elif grid.rank > 1:
                raise error
            """
        done = run(4, tmp_path, source)
        assert (done.code, done.lines[:2]) == (1, ["Rank 1 of 4 left:", "enough"]), done.err
        done = run(4, tmp_path, source.replace("grid.rank == 1", "grid.rank > 4"))
        assert (done.code, done.lines[0]) == (1, "All 4 ranks raised KeyError:"), done.err
        assert done.lines[-3:] == ["KeyError: 4", "raised in program.py, line 10, in f", "[rank 3 of 4]"], done.err

    def test_an_error_raised_on_all_ranks_is_one_line(self, tmp_path: Path) -> None:
        """The exit code is that of a failed command; if only one rank raises the error, the job ends."""
        source = """
            import sys
            from pdgemm import DistMatrix, PdgemmError, ProcessGrid
            try:
                DistMatrix.eye(-1, grid=ProcessGrid())
            except PdgemmError as bad:
                sys.exit(bad)
            """
        done = run(2, tmp_path, source)
        assert (done.code, len(done.lines), done.lines[0]) == (2, 2, "All 2 ranks failed:"), done.err
        alone = (
            "import sys, pdgemm\ngrid = pdgemm.ProcessGrid()\nif grid.rank:\n    sys.exit(pdgemm.PdgemmError('mine'))"
        )
        done = run(2, tmp_path, f"{alone}\ngrid.comm.Barrier()")
        assert done.code == 2 and done.lines == ["Rank 1 of 2 failed:", "mine"], done.err

    def test_an_error_before_mpi_is_told_once(self, tmp_path: Path) -> None:
        done = run(2, tmp_path, "import no_such_module\nfrom mpi4py import MPI\n")
        assert (done.code, done.lines) == (
            1,
            [
                "Rank 0 of 2 raised ModuleNotFoundError:",
                "Traceback (most recent call last):",
                '  File "program.py", line 1, in <module>',
                "    import no_such_module",
                "ModuleNotFoundError: No module named 'no_such_module'",
            ],
        )

    def test_a_rank_fails_without_mpi_when_the_others_have_left(self, tmp_path: Path) -> None:
        source = (
            "from pdgemm.support import launcher\nif launcher.launched_rank() == 1:\n    raise ValueError('mine')\n"
        )
        done = run(2, tmp_path, source)
        assert done.code == 1
        assert done.lines == [
            "Rank 1 of 2 raised ValueError:",
            "Traceback (most recent call last):",
            '  File "program.py", line 3, in <module>',
            "    raise ValueError('mine')",
            "ValueError: mine",
        ]

    def test_ranks_whose_standard_error_is_closed_end_all_the_same(self, tmp_path: Path) -> None:
        done = run(2, tmp_path, "import sys\nfrom mpi4py import MPI\nsys.stderr.close()\n1 / 0\n")
        assert (done.code, done.lines) == (1, [])

    @thorough
    def test_a_rank_may_leave_without_mpi_and_without_a_fault(self, tmp_path: Path) -> None:
        done = run(3, tmp_path, "print('done')")
        assert (done.code, done.out, done.lines) == (0, ["done"] * 3, [])
        finalized = "from mpi4py import MPI\nMPI.Finalize()\nprint('done')"
        done = run(3, tmp_path, finalized)
        assert (done.code, done.out, done.lines) == (0, ["done"] * 3, [])

    @thorough
    def test_a_rank_that_exits_with_a_code_while_others_continue(self, tmp_path: Path) -> None:
        source = """
            import sys
            from mpi4py import MPI
            if MPI.COMM_WORLD.rank == 2:
                sys.exit(4)
            MPI.COMM_WORLD.Barrier()
            """
        done = run(3, tmp_path, source)
        assert done.lines[0] == "Rank 2 of 3 left with exit code 4" and done.code != 0


# ---------------------------------------------------------------- in one process
def test_paths_and_names_of_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multiply").touch()
    scripts = ["a.py x", "/no/such/thing.py", "--debug a.py", "-m timeit", "-c pass", "-", "."]  # "." has a __main__.py
    others = ["multiply a.h5:/x", "multiply", "--help", "--debug", "--debug multiply", "nothing", "", "-c"]
    assert [x for x in (*scripts, *others) if script.is_script(x.split())] == scripts


@pytest.mark.parametrize(
    ("words", "typed", "code", "out", "err"),
    [
        (["-c", "import sys; print(__name__, sys.argv)", "x"], "", 0, "__main__ ['-c', 'x']\n", ""),
        (["-", "x"], "import sys; print(sys.argv); sys.exit(259)", 3, "['-', 'x']\n", ""),
        (["-m", "platform", "terse", "x"], "", 0, None, ""),
        (["-c", "import sys; sys.exit('no')"], "", 1, "", "no\n"),
        (["-c", "import sys, pdgemm; sys.exit(pdgemm.PdgemmError('a\\nb'))"], "", 2, "", "a b\n"),
        (["-c", "import sys, pdgemm; sys.exit(pdgemm.CorruptionError('c'))"], "", 1, "", "c\n"),
        (["-c", "raise KeyboardInterrupt"], "", 130, "", f"{BEGINNING}{STRING}KeyboardInterrupt\n"),
        (["--debug", "-c", "1/0"], "", 1, "", None),
        (["gone.py"], "", 1, "", f"FileNotFoundError: [Errno 2] {GONE}\n"),
    ],
)  # fmt: skip
def test_scripts_in_one_process(
    words: list[str], typed: str, code: int, out: str | None, err: str | None, tmp_path: Path
) -> None:
    command = jobs.python(0, "-m", "pdgemm", *words)
    done = subprocess.run(command, input=typed, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code, done.stderr
    assert out is None or done.stdout == out
    if err is not None:
        assert done.stderr == err.format(cwd=tmp_path.resolve())
    else:
        assert done.stderr.startswith("Traceback") and done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("x.py", "x.py is not a command: python -m pdgemm x.py runs a script"),
        ("mutliply", "No such command 'mutliply'. Did you mean 'multiply'?"),
        ("mult", "No such command 'mult'. Did you mean 'multiply'?"),
        ("help", "No such command 'help'. The commands are calibrate, eigh, einsum, generate, "),
    ],
)
def test_the_command_knows_scripts_and_similar_names(word: str, advice: str) -> None:
    done = CliRunner().invoke(cli, [word, "--debug"])
    assert done.exit_code == 2 and advice in done.output


def told(source: str, tmp_path: Path) -> list[str]:
    """Run a failing program; return the lines of its traceback, without column marks and lines of this file."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(source))
    try:
        exec(compile(path.read_text(), str(path), "exec"), {})
    except Exception as error:
        text = traceback_text(error)
        assert len(traceback_text(error, whole=True)) >= len(text)
    return [x for x in text.splitlines() if __file__ not in x and "exec(compile(" not in x and x.strip(" ^~")]


def test_a_chain_has_lines_of_the_user_and_none_of_the_package(tmp_path: Path) -> None:
    lines = told(
        """
        from pdgemm.planning.machines.machine import load_machine
        try:
            load_machine("/no/such/file")
        except OSError as bad:
            raise RuntimeError("no machine") from bad
        """,
        tmp_path,
    )
    assert lines == [
        BEGINNING.strip(),
        f'  File "{tmp_path}/program.py", line 4, in <module>',
        '    load_machine("/no/such/file")',
        "pdgemm.errors.FileError: machine file /no/such/file: No such file or directory",
        "The above exception was the direct cause of the following exception:",
        BEGINNING.strip(),
        f'  File "{tmp_path}/program.py", line 6, in <module>',
        '    raise RuntimeError("no machine") from bad',
        "RuntimeError: no machine",
    ]


def test_the_innermost_line_of_another_package_is_shown(tmp_path: Path) -> None:
    lines = told("import json\njson.loads('{')", tmp_path)
    assert lines[1].endswith('program.py", line 2, in <module>') and "json" in lines[3] and len(lines) == 6
    lines = told("import numpy\nnumpy.random.default_rng('seed')", tmp_path)
    assert lines[1].endswith('program.py", line 2, in <module>') and sum(".pyx" in line for line in lines) == 1, lines
