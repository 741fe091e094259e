"""Registered movers, algorithms and element types: the command line and the documentation list all of them."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

import jobs
import numpy as np
import pytest
from allgather_3d import ENTRY, allgather_3d_registered

from pdgemm import names
from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.arguments import op_letter
from pdgemm.local.arrays.device import _MODULES as device_modules, HOST
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.local.arrays.element_functions import KINDS
from pdgemm.planning import algorithm_registry
from pdgemm.planning.algorithm_registry import ALGORITHMS
from pdgemm.planning.machines.machine import KINDS as LINKS, Machine
from pdgemm.planning.machines.simulator import product_seconds, simulate
from pdgemm.planning.planner import plan_product
from pdgemm.planning.problem import Problem
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.question import layouts_of, movers
from pdgemm.schedules.mover_registry import MOVERS, POLICIES, by_messages, fan_out, mover_choices

ROOT = Path(__file__).parents[2]


def rows(path: str, head: str) -> list[str]:
    """Return the rows of the table with this header on a page."""
    table = (ROOT / path).read_text().split(head)[1].split("\n\n")[0]
    return table.strip().splitlines()[1:]


def test_the_documentation_lists_registered_entries() -> None:
    """Tables of movers, element types and algorithms equal the registered entries."""
    table = [f"| `{name}` | host, GPUs | {summary} |" for name, summary in POLICIES.items()]
    table += [f"| `{x.name}` | {'host, ' * x.on_host}GPUs | {x.summary} |" for x in MOVERS.values()]
    assert rows("docs/choosing.md", "| mover | matrices on | |\n") == table
    table = []
    for dtype in dict.fromkeys((*dtypes.OPERANDS, *dtypes.RESULTS)):
        x = dtypes.TYPE[dtype]
        of = ", ".join(["A, B"] * x.operand + ["C"] * x.result)
        table.append(f"| `{x.name}` | {of} | `{x.sums_dtype}` | {'yes' if x.hdf5 else 'no'} |")
    assert rows("docs/choosing.md", "| type | matrices | products are added up in | HDF5 |\n") == table
    table = rows("docs/choosing.md", "| | words that a rank receives | extra memory | good for |\n")
    policies = ("| `row`, `column` |", "| `allgather`, `reduce_scatter` |")
    listed = [row for row in table if not row.startswith(policies)]
    named = [(", ".join(f"`{name}`" for name in x.names), x) for x in ALGORITHMS.values()]
    assert listed == [f"| {name} | {x.words} | {x.memory} | {x.good_for} |" for name, x in named]
    assert len(table) == len(listed) + len(policies)
    docstring = (ROOT / "pdgemm" / "gemm.py").read_text().split('"""')[3]
    assert all(x.name in docstring for x in dtypes.OPERANDS)
    choices = (*mover_choices(), *dtypes.COMPUTE, *algorithm_registry.algorithm_choices())
    assert all(f'"{name}"' in docstring for name in choices)


def test_every_mover_has_a_link_and_senders() -> None:
    assert {*by_messages()} <= {*LINKS} <= {*Machine().intra}
    for mover in MOVERS.values():
        assert mover.link in LINKS
        for parts in range(1, 20):
            senders = mover.senders(parts).tolist()
            assert len(senders) == parts - 1
            # ranks receive from ranks that have the panel
            assert all(0 <= sender < distance for distance, sender in enumerate(senders, 1))
            assert 1 <= mover.hops(parts) <= max(1, parts - 1)
            most, others = fan_out(mover, parts)
            assert most * parts + sum(more for _, more in others) == parts - 1
            assert all(dict(others).get(at, 0) + most == senders.count(at) for at in range(parts))


def test_the_command_line_offers_registered_entries() -> None:
    """A mover and an algorithm that are registered before commands run are offered and planned."""
    code = """
import sys
from allgather_3d import allgather_3d_registered
from tree_mover import tree_planned
with allgather_3d_registered(), tree_planned():
    from pdgemm.tools.cli.commands import cli
    for words in sys.argv[1:]:
        cli(words.split(), standalone_mode=False)
        print("\\f")
"""
    asked = "--shape 96,96,960 --ranks 8"
    commands = ["multiply --help", "plan --help", "scaling --help", f"plan --all {asked}"]
    commands += [f"simulate --algorithm allgather_3d {asked}"]
    path = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parents[1] / 'helpers'}", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code, *commands], capture_output=True, text=True, check=False, timeout=60, env=path
    )
    assert done.returncode == 0, done.stderr
    multiply, plan, scaling, table, simulated, _ = done.stdout.split("\f")
    assert f"[{'|'.join((*mover_choices(), 'tree'))}]" in multiply and f"[{'|'.join((*movers(), 'tree'))}]" in plan
    with allgather_3d_registered():
        offered = f"[{'|'.join(algorithm_registry.algorithm_choices())}]"
    assert all(offered in text for text in (multiply, plan, scaling))
    assert "allgather_3d" in table and "allgather_3d" in simulated


def test_every_element_type_has_an_arithmetic() -> None:
    assert {str(x) for x in dtypes.BLAS} <= {*Machine().gamma}
    assert {*dtypes.SUMS} <= {*dtypes.BLAS, *(x.dtype for x in dtypes.TYPES if x.dtype.kind == "i")}
    for x in dtypes.TYPES:
        assert not x.wire or np.dtype(x.wire).itemsize == x.dtype.itemsize
        assert not x.sums or x.operand or x.name == "float8_e8m0fnu"  # a type of scales only


@jobs.needs_mpiexec
def test_a_new_entry_is_a_new_type() -> None:
    helpers = ROOT / "tests" / "helpers"
    done = jobs.run(jobs.python(2, helpers / "float8.py"), PYTHONPATH=f"{ROOT}:{helpers}")
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------ algorithms
def test_every_algorithm_has_a_name_a_schedule_and_an_executor_of_its_own() -> None:
    entries = list(ALGORITHMS.values())
    assert len({entry.product for entry in entries}) == len({entry.executor for entry in entries}) == len(entries)
    for name, entry in ALGORITHMS.items():
        assert name == entry.name == entry.product.algorithm
        assert callable(resolve_name(entry.executor))
        assert any(entry.runs_on(pr, pc, c, 8) for pr, pc, c in itertools.product(range(1, 9), repeat=3))
    before = dict(ALGORITHMS)  # a name cannot be registered twice
    for name in algorithm_registry.algorithm_choices():
        for taken in (replace(ENTRY, name=name), replace(ENTRY, twin=name)):
            with pytest.raises(ArgumentError, match=f"algorithm '{name}' exists already"):
                algorithm_registry.register_algorithm(taken)
    assert before == ALGORITHMS


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 2, 1), (3, 2, 4)])
def test_the_rounds_of_an_algorithm_are_its_costs(shape: tuple[int, int, int]) -> None:
    """Words and messages of the 3D all-gather, added up over its rounds, equal those of the paper."""
    pr, pc, c = shape
    m, n, k = 24 * pr * pc * c, 12 * pr * pc * c, 36 * pr * pc * c
    ranks = pr * pc * c
    with allgather_3d_registered():
        shapes = {"A": (m, k), "B": (k, n), "C": (m, n)}
        A, B, C = layouts_of("default", {name: (x, np.dtype("d")) for name, x in shapes.items()}, ranks).values()
        asked: dict[str, Any] = {"algorithm": ENTRY.name, "shape": (pr, pc), "layers": c}
        plan = plan_product(Problem(A, B, C, ranks, True, np.dtype("d"), 512, 1, "ibcast", **asked))
        product = plan.product
        saved = plan.to_json()
        assert ProductPlan.from_json(saved) == plan
        walked = simulate(product, Machine(), ranks)
        for rank in range(ranks):
            words = (m * k * (pc - 1) + k * n * (pr - 1) + m * n * (c - 1)) // ranks
            messages = pc + pr + c - 3
            assert product.traffic(rank) == Traffic(words, words, messages, messages) == walked.traffic(rank)
            assert product.local_shape(rank) == (m // pr, n // pc, k // c)
        assert product.total_words == ranks * words
        assert product_seconds(product, Machine(), 0) == pytest.approx(walked.seconds, rel=0.2)
    with pytest.raises(ArgumentError, match="not a plan that was saved"):
        ProductPlan.from_json(saved)


def test_literal_types_list_the_accepted_names() -> None:
    def of(union: Any) -> list[str]:
        return [name for part in get_args(union) for name in get_args(part) or [part] if isinstance(name, str)]

    assert of(names.AlgorithmName) == [*algorithm_registry.algorithm_choices()]
    assert sorted(of(names.MoverName)) == sorted(mover_choices())
    assert of(names.DeviceName) == [HOST, *device_modules]
    assert of(names.ComputeType) == [*dtypes.COMPUTE]
    assert {*get_args(names.RandomKind)} == {*KINDS} - {"eye", "ones", "zeros"}  # these are not random
    for letter in get_args(names.Transpose):
        assert op_letter(letter, "transa") == letter.upper()
    assert [*get_args(names.ElementTypeName)] == [x.name for x in dtypes.TYPES]
    for code in get_args(names.ElementTypeCode):
        assert element_type(code).name in get_args(names.ElementTypeName)
    assert {np.dtype(code) for code in get_args(names.ElementTypeCode)} == {
        x for x in dtypes.TYPE if x.type.__module__ == "numpy"
    }
