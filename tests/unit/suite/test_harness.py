"""Reports of parallel runs (mpi_report.py) of small test files on 3 ranks."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest

pytestmark = [jobs.needs_mpiexec, pytest.mark.timeout(60)]
HEAD = """
import pytest
from mpi4py import MPI
pytestmark = pytest.mark.mpi
rank = MPI.COMM_WORLD.rank
"""


def run(folder: Path, source: str, *options: str, launcher: str = "mpiexec -n 3") -> SimpleNamespace:
    """Run the source as a test file; return .code, .out, .err, .text (out + err), and .summary or None."""
    (folder / "test_it.py").write_text(textwrap.dedent(source))
    result = folder / "summary.json"
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2] / "helpers"),
        "PDGEMM_TEST_SUMMARY": str(result),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a quicker start with the necessary plugins only
        "PYTEST_ADDOPTS": "",
    }
    plugins = "-p pytest_timeout -p pytest_mpi -p mpi_report -p no:cacheprovider"
    command = f"{launcher} {sys.executable} -m pytest {plugins}"
    words = ["--rootdir=.", "--color=no", "-ra", "--timeout=30", *options, "test_it.py"]
    done = jobs.run([*command.split(), *words], cwd=folder, timeout=50, **environment)
    out, err = done.stdout.replace("\r", ""), done.stderr.replace("\r", "")
    summary = json.loads(result.read_text()) if result.exists() else None
    return SimpleNamespace(code=done.returncode, out=out, err=err, text=out + err, summary=summary)


def mpi(folder: Path, source: str, *options: str, launcher: str = "mpiexec -n 3") -> SimpleNamespace:
    return run(folder, HEAD + textwrap.dedent(source), "--with-mpi", *options, launcher=launcher)


def counts(summary: dict[str, float]) -> dict[str, float]:
    return {k: summary[k] for k in ("passed", "failed", "skipped")}


def test_all_pass_and_one_rank_speaks(tmp_path: Path) -> None:
    done = mpi(tmp_path, """
        import warnings

        def test_comm(comm):
            assert comm is MPI.COMM_WORLD
            print("noise")
            warnings.warn("more noise")

        seen = []
        @pytest.mark.parametrize("again", [0, 1])
        def test_shared_tmp_path(comm, shared_tmp_path, again):
            assert comm.allgather(str(shared_tmp_path)) == [str(shared_tmp_path)] * 3
            assert not list(shared_tmp_path.iterdir())
            comm.Barrier()
            (shared_tmp_path / str(rank)).touch()
            seen.append(shared_tmp_path)

        def test_it_is_gone():
            assert len(set(seen)) == 2
            assert not any(path.exists() for path in seen)

        @pytest.mark.mpi(min_size=4)
        def test_too_few():
            assert False

        @pytest.mark.xfail
        def test_known():
            assert False
    """)  # fmt: skip
    assert done.code == 0, done.text
    assert counts(done.summary) == {"passed": 4, "failed": 0, "skipped": 2}
    assert done.summary["left_out"] == ["test_it.py::test_too_few", "test_it.py::test_known"]
    assert len(done.summary["ran"]) == 4
    assert done.out.count("test session starts") == 1
    assert "mpi: 3 ranks" in done.out
    assert "noise" not in done.out.replace("UserWarning: more noise", "").replace('warn("more noise")', "")
    assert done.out.count("UserWarning: more noise") == 1
    assert "4 passed, 1 skipped, 1 xfailed" in done.out.splitlines()[-1]
    assert done.err.strip() == ""


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return mpi(tmp_path_factory.mktemp("failures"), """
        def test_fine():
            pass

        def test_one():
            print("the output of", rank)
            if rank == 1:
                raise RuntimeError("boom one")

        def test_two():
            if rank > 0:
                raise RuntimeError(f"boom two {rank}")

        def test_all():
            raise RuntimeError("boom all")

        def test_mixed_skip():
            if rank == 1:
                pytest.skip("not here")

        @pytest.mark.xfail
        def test_mixed_xfail():
            assert rank

        @pytest.fixture
        def bad_start():
            if rank == 2:
                raise RuntimeError("boom setup")

        def test_setup(bad_start):
            raise RuntimeError("a test without its fixture")

        @pytest.fixture
        def bad_end():
            yield
            if rank == 2:
                raise RuntimeError("boom teardown")

        def test_teardown(bad_end):
            pass

        def test_still_together(comm):
            assert comm.allreduce(1) == 3
    """)  # fmt: skip


def tracebacks(text: str, error: str) -> int:
    """Return the number of tracebacks in pytest's form that end in this error."""
    return len(re.findall(rf"^\s*E +{re.escape(error)}$", text, re.MULTILINE))


def section(text: str, name: str) -> str:
    """Return the section of the report on one test."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("__") and line.rstrip(" _").endswith(name))
    end = next(n for n in range(start + 1, len(lines)) if lines[n].startswith(("__", "==")))
    return "\n".join(lines[start:end])


def test_a_failure_is_shown_once_as_the_lowest_failing_rank_saw_it(failures: SimpleNamespace) -> None:
    assert failures.code != 0
    one, all_ranks = section(failures.out, "test_one"), section(failures.out, "test_all")
    for text, error in ((one, "boom one"), (all_ranks, "boom all")):
        assert tracebacks(failures.text, f"RuntimeError: {error}") == 1
        assert text.index("failed on") < text.index(error)
    assert "failed on rank 1 of 3" in one and "the output of 1" in one
    assert failures.text.count("the output of") == 2  # the output, and the source line of the print
    assert "failed on ranks 1, 2 of 3" in section(failures.out, "test_two")
    assert "boom two 1" in failures.text and "boom two 2" not in failures.text
    assert "failed on all 3 ranks" in all_ranks
    assert counts(failures.summary) == {"passed": 2, "failed": 7, "skipped": 0}
    tail = failures.out.splitlines()
    assert "5 failed, 3 passed, 2 errors" in tail[-1]
    assert "FAILED test_it.py::test_one - RuntimeError: boom one" in tail


def test_disagreement_setup_and_teardown_are_failures(failures: SimpleNamespace) -> None:
    for name, said in (
        ("test_mixed_skip", "the outcome differs: passed on ranks 0, 2; skipped on rank 1 of 3"),
        ("test_mixed_xfail", "xfailed on rank 0; xpassed on ranks 1, 2 of 3"),
        ("at setup of test_setup", "failed on rank 2 of 3"),
        ("at teardown of test_teardown", "failed on rank 2 of 3"),
    ):
        assert said in section(failures.out, name)
    assert "a test without its fixture" not in failures.text


def test_hang_ends_with_stacks(tmp_path: Path) -> None:
    done = mpi(tmp_path, """
        def test_before():
            assert rank != 0, "an earlier failure"

        def test_hang(comm):
            if rank == 1:
                raise RuntimeError("the culprit")
            comm.Barrier()

        def test_after():
            pass
    """, "--timeout=2")  # fmt: skip
    assert done.code != 0
    assert tracebacks(done.err, "RuntimeError: the culprit") == 1
    culprit, _, rest = done.err.partition("RuntimeError: the culprit")
    assert "[rank 1 of 3] test_it.py::test_hang (call): still waiting" in culprit
    assert "[rank 0 of 3] timeout of 2 s in test_it.py::test_hang" in rest
    assert "comm.Barrier()" in rest
    assert "an earlier failure" in section(done.out, "test_before")  # earlier failures are reported, too
    assert "FAILED test_it.py::test_hang - timeout" in done.out
    assert counts(done.summary) == {"passed": 0, "failed": 2, "skipped": 0}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("pass", "number 1 is test_it.py::test_n[2] on rank 0, test_it.py::test_n[3] on rank 2"),
        ("if rank == 1: raise ImportError('not on this rank')", "E   ImportError: not on this rank"),
    ],
    ids=["order", "import"],
)
def test_different_collections_end_the_job(tmp_path: Path, line: str, said: str) -> None:
    source = """
        @pytest.mark.parametrize("n", [1, 2 + rank // 2])
        def test_n(n):
            pass
    """
    done = mpi(tmp_path, f"{line}\n{textwrap.dedent(source)}")
    assert done.code != 0 and done.summary is None
    assert done.err.count("the ranks collected different tests") == done.err.count(said) == 1


def test_first_failure_and_interrupt_stop_all_ranks(tmp_path: Path) -> None:
    source = """
        def test_interrupt():
            if rank == 1:
                raise KeyboardInterrupt

        def test_fails():
            assert rank != 2

        def test_never(comm):
            print("never", file=open("never", "w"))
    """
    done = mpi(tmp_path, source, "-x", "-k", "not interrupt")
    assert done.code == 1 and "stopping after 1 failures" in done.out
    assert counts(done.summary) == {"passed": 0, "failed": 1, "skipped": 0}
    done = mpi(tmp_path, source)
    assert done.code == pytest.ExitCode.INTERRUPTED and done.summary is None
    assert "KeyboardInterrupt: on rank 1" in done.out
    assert not (tmp_path / "never").exists()


def test_hypothesis_keeps_step(tmp_path: Path) -> None:
    pytest.importorskip("hypothesis")
    done = mpi(tmp_path, """
        from hypothesis import given, strategies as st

        @given(st.lists(st.floats()), st.data())
        def test_same(comm, a, data):
            assert len(set(comm.allgather(repr((a, data.draw(st.integers())))))) == 1

        @given(st.integers(0, 1000))
        def test_fails(comm, n):
            comm.Barrier()
            if rank == 1:
                assert n < 500
    """, "--timeout=10", launcher="mpiexec -n 2")  # fmt: skip
    assert done.summary is not None, done.text
    assert counts(done.summary) == {"passed": 1, "failed": 1, "skipped": 0}, done.text
    assert "assert 500 < 500" in done.out
    assert "still waiting" not in done.err


def test_tests_run_on_their_numbers_of_ranks(tmp_path: Path) -> None:
    """With --tiers on 3 ranks: tests for every grid and for 3 ranks; without --tiers all; thorough ones with --all."""
    source = """
        import tiers

        @tiers.every_grid
        def test_grids():
            pass

        @pytest.mark.on_ranks(2, 3)
        def test_named():
            pass

        @pytest.mark.on_ranks(2)
        def test_elsewhere():
            pass

        def test_usual():
            pass

        @tiers.every_grid
        @tiers.thorough
        def test_thorough():
            pass
    """
    for launcher, option, left in (("mpiexec -n 3", "--tiers", "gn"), ("", "--all", "gneut")):
        done = mpi(tmp_path, source, "-p", "tiers", option, launcher=launcher)
        ran = [name.partition("::test_")[2][0] for name in done.summary["ran"]]
        assert (done.code, "".join(ran)) == (0, left), done.text
        assert f"{5 - len(left)} deselected" in done.out or len(left) == 5


def test_serial_run_leaves_mpi_alone(tmp_path: Path) -> None:
    source = """
        def test_plain(shared_tmp_path):
            import sys
            assert shared_tmp_path.is_dir() and "mpi4py" not in sys.modules
    """
    done = run(tmp_path, source, launcher="")
    assert done.code == 0, done.text
    assert counts(done.summary) == {"passed": 1, "failed": 0, "skipped": 0}
