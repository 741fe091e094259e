"""The watchdog sees each wait of the package for other ranks."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from house import MODULES, trees
from mpi4py import MPI

from pdgemm.support import waits
from pdgemm.support.waits import Stillness, namespace, process

PACKAGE = Path(waits.__file__).parents[1]
REQUESTS = {"Wait", "Waitall", "Waitany", "Waitsome", "Allocate_shared", "Agree", "Shrink", "Ibarrier"}
MAKERS = {"Dup", "Split", "Split_type", "Sub", "Create_cart", "Create_group", "Shrink"}
NO_WAIT = {
    # `Wait` methods of requests: their callers are checked
    *("instrument/recorder.py", "transport/movers/reduce.py", "transport/movers/pipeline.py"),
    # they wait for events of the device
    *("transport/movers/nccl.py", "transport/panels/task.py", "devices/cuda_nccl.py", "devices/streams.py"),
}
CALLERS_OWN = {"resilience/survivors.py", "tools/studies/measure.py", "support/watchdog.py"}


@cache
def calls() -> list[tuple[str, ast.Call, list[ast.AST]]]:
    """Return each method call in the package: module, call, and the nodes around it, from the outermost."""

    def inside(node: ast.AST, above: list[ast.AST]) -> Iterator[tuple[ast.Call, list[ast.AST]]]:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, above
        for child in ast.iter_child_nodes(node):
            yield from inside(child, [*above, node])

    places = {str(path.relative_to(PACKAGE)): trees()[module] for module, path in MODULES.items()}
    return [(place, *found) for place in sorted(places) for found in inside(places[place], [])]


def in_block(above: list[ast.AST], name: str) -> bool:
    return any(name in ast.unparse(item) for x in above if isinstance(x, ast.With) for item in x.items)


def test_the_watchdog_sees_waits_for_requests() -> None:
    seen = set()
    for module, call, above in calls():
        name = call.func.attr  # type: ignore[attr-defined]
        if name not in REQUESTS or module in NO_WAIT:
            continue
        if not ast.unparse(call.func).startswith("CollectiveRun("):  # it contains `with Wait()`
            assert in_block(above, "Wait("), f"{module}:{call.lineno} waits for other ranks outside of `with Wait()`"
            seen.add(name)
    assert seen >= REQUESTS - {"Waitsome"}


def test_the_watchdog_sees_files_being_opened_and_closed() -> None:
    tree = ast.parse((PACKAGE / "io/dataset_access.py").read_text())
    waiting = [ast.unparse(x) for x in ast.walk(tree) if isinstance(x, ast.With) and "Wait(" in ast.unparse(x.items[0])]
    assert any("file = opening()" in x for x in waiting) and any("closing(file)" in x for x in waiting)
    opens = ((module, call.func) for module, call, _ in calls() if call.func.attr == "Open")  # type: ignore[attr-defined]
    opened = {module for module, name in opens if ast.unparse(name) == "MPI.File.Open"}
    assert opened == {"io/dataset_access.py"}  # in `open_on_all`


def test_blocking_calls_of_new_communicators_are_waits() -> None:
    seen = set()
    for module, call, above in calls():
        if call.func.attr in MAKERS and module not in CALLERS_OWN:  # type: ignore[attr-defined]
            around = [ast.unparse(x.func) for x in above if isinstance(x, ast.Call)]
            nothing = ast.unparse(call).endswith("Split(MPI.UNDEFINED)")
            assert nothing or {"tracked", "failures.tracked"} & {*around}, (
                f"{module}:{call.lineno}: tracked(...) is missing"
            )
            seen.add(module)
    assert seen >= {"grids/process_grid.py", "grids/node_memory.py"}


def test_the_outer_wait_counts_and_an_error_ends_it() -> None:
    outer = waits.Wait()
    with outer:
        with waits.Wait():
            assert waits.this_rank.wait is outer
        assert waits.this_rank.wait is outer
    assert waits.this_rank.wait is None
    with pytest.raises(KeyError), waits.Wait():
        raise KeyError
    assert waits.this_rank.wait is None


def test_blocking_calls_are_waits() -> None:
    seen = []

    class Comm(MPI.Intracomm):
        def allgather(self, x: object) -> list[object]:  # type: ignore[override]
            seen.append(waits.this_rank.wait)
            return super().allgather(x)

    comm = waits.watched_calls(Comm(MPI.COMM_SELF))
    assert comm.allgather(3) == [3] and waits.this_rank.wait is None
    assert seen[0] is not None and seen[0].comm is comm and not seen[0].check
    assert waits.watched_calls(comm) is comm and comm == MPI.COMM_SELF
    assert not waits.watched_calls(MPI.COMM_NULL)


def test_stillness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds without progress: work, new waits and file accesses are progress; stopped time does not count."""
    clock = {"monotonic": 0.0, "process_time": 0.0, "_blocks": 0}
    for name in clock:
        monkeypatch.setattr(f"pdgemm.support.waits.{name}", lambda name=name: clock[name])
    still = Stillness()

    def after(seconds: float, work: float = 0.0, blocks: int = 0) -> float:
        clock["monotonic"] += seconds
        clock["process_time"] += work
        clock["_blocks"] += blocks
        still.look(2.0)
        return still.seconds

    assert [after(1.0), after(1.0), after(100.0), after(1.0, work=0.5)] == [1.0, 2.0, 4.0, 0.0]
    with waits.Wait():
        assert [after(1.0), after(1.0, work=1.0), after(1.0, blocks=1), after(1.0)] == [0.0, 1.0, 0.0, 1.0]
    with waits.Wait(check=True):
        assert [after(1.0), after(1.0, work=1.0, blocks=1)] == [0.0, 1.0]
    with waits.Wait(check=True):
        assert after(1.0) == 0.0


def test_the_state_of_another_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            while not process(namespace(), child.pid)[1]:
                pass  # wait until the child has used its processor
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            state, used = process(namespace(), child.pid)
            assert state == "T" and process(namespace(), child.pid)[1] == used > 0
        finally:
            child.kill()
    assert process(namespace(), child.pid) == process("another machine", os.getpid()) == process("", 1) == ("", 0)
