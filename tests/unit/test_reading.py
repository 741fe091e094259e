"""Any contents of files, variables and arguments: errors are pdgemm's, of one line, with exit code 2."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from study_records import record
from tiers import examples, in_turn
from timelines import GOOD, timeline

from pdgemm.errors import ArgumentError, FileError, PdgemmError
from pdgemm.gemm import Plan
from pdgemm.planning.machines.machine import Machine, load_machine
from pdgemm.support.files import read_file
from pdgemm.support.json_input import Count, variable
from pdgemm.support.launcher import LAUNCHERS, allocated_ranks, local_rank
from pdgemm.tools.cli import commands as cli
from pdgemm.tools.cli.options import NUMBER
from pdgemm.tools.cli.session import check_launcher
from pdgemm.tools.profiling import profile
from pdgemm.tools.profiling.profile_tables import tables
from pdgemm.tools.studies import plot, records
from pdgemm.tools.studies.cases import cases
from pdgemm.tools.studies.curves import read_all
from pdgemm.tools.studies.figures import panels
from pdgemm.tools.studies.jobs import threads_per_rank
from pdgemm.tools.studies.predictions import question

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
HUGE = 10**400
JUNK = [
    None, True, False, 0, -1, 1, 2, 7, 0.5, -0.5, 1e-300, 1e300, 2**31, 2**53, 2**62, 2**63, 10**18, 10**30,
    HUGE, -HUGE, "", "x", "float64", "a" * 100_000, "\0", "\u2028", [], {}, [[]], [1], [-1], {"a": 1},
    {"": {}}, [0] * 1000,
]  # fmt: skip
TEXTS = [  # numbers that JSON, or Python's json, cannot represent
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 5000, "-" + "9" * 5000,
    '"\\ud800"', '"\\ud800x"',
    "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "01", "1.", "'x'", "tru", '"\x01"',
]  # fmt: skip


# ------------------------------------------------------------------ kinds of files, and readers of them
def plans() -> Iterator[str]:
    for ranks, algorithm in ((1, "auto"), (4, "summa"), (4, "cannon"), (6, "stationary_b"), (8, "2.5d"), (3, "inner")):
        (case,) = cases("strong", [(40, 30, 20)], [ranks], algorithms=[algorithm], memory_limit=10**6)
        yield question(case, Machine(ranks_per_node=2)).plan().to_json()


def of_a_plan(path: Path) -> None:
    plan = Plan.from_json(read_file(path).decode(errors="surrogateescape"))
    for rank in {0, 1, plan.problem.size - 1}:
        plan.traffic(rank), plan.buffers(rank), plan.extra_bytes(rank)
    assert str(plan) and plan.total_words >= 0 and plan.cost >= 0
    assert Plan.from_json(plan.to_json()) == plan


def of_a_machine(path: Path) -> None:
    machine = load_machine(path)
    assert str(machine) and machine == Machine.from_dict(json.loads(machine.as_json()))
    (case,) = cases("strong", [(4000, 3000, 2000)], [8])
    assert np.isfinite(question(case, machine).plan().seconds)


def of_a_timeline(path: Path) -> None:
    found = profile.load_profile(path)
    assert json.dumps(found.as_dict(), allow_nan=False) and tables(found)


def of_a_study(path: Path) -> None:
    study = records.read_study(path)
    records.left(study, study.attempts), records.check_setting(path, records.Study(), {})
    if study.machine is not None:
        with suppress(PdgemmError):
            Machine.from_dict(study.machine)
    found = read_all([path])
    plot.predict_curves(found, None, 2)
    for section in found.sections:
        assert all(x.title for x in panels(section))
        assert plot.tables_of_section(section)
    assert plot.page(found, [])


def timelines(folder: Path) -> Iterator[str]:
    move = {"name": "A", "seconds": 0.1}
    ring = GOOD | {"moves": [("ring", 0.0, 0.9, 1 << 20)], "hidden": 0.5}
    yield timeline(folder / "good.json", ring, GOOD, moves=[move]).read_text()


def studies() -> Iterator[str]:
    lines: list[dict[str, Any]] = [{"machine": json.loads(Machine(name="m").as_json())}]
    for kind in ("strong", "weak"):
        lines += [record(case, 4.0) for case in cases(kind, [(64, 48, 32)], [1, 2])]
    yield "".join(json.dumps({"format": 1, **x}) + "\n" for x in lines)


READERS: dict[str, tuple[Callable[[Path], Iterator[str]], Callable[[Path], None]]] = {
    "plan": (lambda _: plans(), of_a_plan),
    "machine": (lambda _: iter([Machine(name="m", ranks_per_node=4).as_json()]), of_a_machine),
    "timeline": (timelines, of_a_timeline),
    "study": (lambda _: studies(), of_a_study),
}


# ------------------------------------------------------------------ damage
def places(x: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all pairs of a container in x and one of its keys."""
    for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield x, key
        yield from places(value)


def in_the_tree(rng: random.Random, text: str) -> str:
    """Return JSON text in which one value or name is replaced, deleted, exchanged or repeated."""
    tree = json.loads(text)
    inside, key = rng.choice(list(places(tree)))
    what, mark = rng.randrange(8), "@mark@"
    if what < 4:
        inside[key] = rng.choice(JUNK)
    elif what == 4:
        inside[key] = mark
        return json.dumps(tree).replace(f'"{mark}"', rng.choice(TEXTS))
    elif what == 5:
        del inside[key]
    elif isinstance(inside, dict):
        inside[rng.choice([*inside, "x" * 1000, "a"])] = inside[key]
        if what == 6:
            inside[str(HUGE)] = inside.pop(key)
    else:
        other = rng.randrange(len(inside))
        inside[key], inside[other] = inside[other], inside[key]
        if what == 6:
            inside += inside
    return json.dumps(tree)


def everywhere(rng: random.Random, text: str) -> str:
    """Return JSON text in which a number is replaced at all places, so that the parts remain consistent."""
    number = rng.choice(re.findall(r"(?<=[: \[])-?[0-9.e+-]+(?=[,\]}])", text))
    other = rng.choice([json.dumps(x) for x in JUNK if type(x) in (int, float)])
    return re.sub(rf"(?<=[: \[]){re.escape(number)}(?=[,\]}}])", other, text)


def damaged(rng: random.Random, text: str, lines: bool) -> bytes:
    what = rng.randrange(12)
    if what >= 10:
        return everywhere(rng, text).encode()
    if what < 6:
        rows = text.splitlines() if lines else [text]
        at = rng.randrange(len(rows))
        rows[at] = in_the_tree(rng, rows[at])
        return "\n".join(rows).encode("utf-8", "surrogatepass")
    data = bytearray(text.encode())
    if what == 6:
        return bytes(data[: rng.randrange(len(data))])
    if what == 7:
        at = rng.randrange(len(data))
        return bytes(data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at + rng.randrange(9) :])
    for _ in range(rng.choice((1, 3))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("kind", READERS)
def test_damage(kind: str, tmp_path: Path) -> None:
    """A damaged file is refused, or all results computed from it are numbers."""
    rng, (texts, use) = random.Random(18), READERS[kind]
    path, refused, whole = tmp_path / "x.json", 0, list(texts(tmp_path))
    for text in whole:
        path.write_text(text)
        use(path)
        for _ in range(examples(300) // len(whole)):
            path.write_bytes(damaged(rng, text, kind == "study"))
            try:
                use(path)
            except PdgemmError as bad:
                refused += 1
                assert len(str(bad)) < 2000
    assert refused > examples(300) / (60 if kind == "study" else 2)  # a damaged line of a study is skipped


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_ends_early(kind: str, tmp_path: Path) -> None:
    texts, use = READERS[kind]
    path, whole = tmp_path / "x.json", next(texts(tmp_path)).rstrip()
    for end in range(0, len(whole), 1 + len(whole) // examples(300)):
        path.write_text(whole[:end])
        if kind == "study":
            records.read_study(path)
        else:
            with pytest.raises(PdgemmError):
                use(path)


# ------------------------------------------------------------------ named cases
def test_the_message_names_the_file_the_place_and_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.json"
    for given, said in (
        (f'{{"copy_bandwidth": {HUGE}}}', r"m\.json: Number out of range - at `\$\.copy_bandwidth`"),
        (f'{{"copy_bandwidth": {"9" * 5000}}}', r"m\.json: .*out of range"),
        ('{"copy_bandwidth": NaN}', r"m\.json: JSON is malformed"),
        ('{"intra": {"ring": {"alpha": 0, "beta": 1}}}', r">= 1e-30 - at `\$\.intra\[\.\.\.\]\.alpha`"),
        (
            '{"intra": {"ring": {"alpha": 1, "beta": 1, "gamma": 1}}}',
            r"gamma. is not a field of it - at `\$\.intra\.ring`",
        ),
        ('{"gamma": {"float64": {"0": 1e9}}}', r"at `key` in `\$\.gamma"),
        ("[" * 100_000, "too deeply|Expected `object`"),
        ('{"name": "\udcff"}', r"m\.json: "),
        ("\ufeff{}", "malformed"),
        ("", "truncated"),
    ):
        path.write_text(given, errors="surrogateescape")
        with pytest.raises(ArgumentError, match=said):
            load_machine(path)
    monkeypatch.setenv("PDGEMM_MACHINE", str(path))
    with pytest.raises(ArgumentError, match=r"m\.json \(PDGEMM_MACHINE\): "):
        load_machine()


def test_only_files_of_a_sensible_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)  # a sparse file
    for name, said in (
        ("pipe", "it is a FIFO, not a file"),
        ("large", "larger than"),
        ("", "it is a folder, not a file"),
        ("x\0", "null"),
    ):
        for reader in (load_machine, profile.load_profile, records.read_study):
            with pytest.raises(FileError, match=said):
                reader(tmp_path / name)
    with pytest.raises(FileError, match="it is a character device, not a file"):
        load_machine("/dev/zero")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"block": [0-9]+', '"block": 1', "blocks in a row or a column"),
        ('"n": [0-9]+', '"n": 1000000000000', "blocks in a row|bytes of a matrix"),
        ('"n": [0-9]+', f'"n": {HUGE}', "."),
        ('"rows": [0-9]+', '"rows": 0', "panels or its lookahead are too small"),
        ('"layers": [0-9]+', '"layers": 1000000000', "."),
        ('"size": [0-9]+', '"size": 2', "different rank from 0 to . at each position"),
        ('"rank_map": \\[0, 1', '"rank_map": [1, 1', "different rank from 0 to . at each position"),
        ('"mover": "[a-z]+", "algorithm"', '"mover": "pigeon", "new": 1, "algorithm"', "'new' is not a field of it"),
        ('"mover": "[a-z]+"', '"mover": "pigeon"', "its mover 'pigeon' cannot transfer"),
        ('"source": 0', '"source": 1', "."),
        ('"dtype": "float64"', '"dtype": "O"', "not an element type"),
        ('"transposed": false', '"transposed": true', "."),
        ('"algorithm": "Layered"', '"algorithm": "Cannon"', "'rank_map' is not a field of it"),
        ('"algorithm": "Layered"', '"algorithm": "Inner"', "missing required field"),
        ('"algorithm": "Layered"', '"algorithm": "Product"', "Invalid value 'Product'"),
    ],
)
def test_a_plan_whose_parts_do_not_fit(old: str, new: str, said: str) -> None:
    """A plan with inconsistent parts is refused before anything is computed from them."""
    (case,) = cases("strong", [(400, 400, 40_000_000)], [8], algorithms=["2.5d"])
    text = question(case, Machine()).plan().to_json()
    assert re.search(old, text)
    with pytest.raises(ArgumentError, match=f"not a plan.*{said}"):
        Plan.from_json(re.sub(old, new, text))


def test_file_names_may_be_any_bytes(run: Any) -> None:
    """File names that are not valid UTF-8 are accepted; the study can be resumed."""
    (case,) = cases("strong", [(8, 8, 8)], [1])
    records.append(Path("s.jsonl"), records.failed_record(case, "it is \udcff", ["pdgemm", "--out", "\udcff.jsonl"]))
    assert records.open_study(Path("s.jsonl")).attempts == [case]
    Path("\udcff.jsonl").write_text(next(studies()))
    assert run("plot", "\udcff.jsonl", "--out", "\udcff.html") == 0
    assert "&#56575;.jsonl" in Path("\udcff.html").read_text()


# ------------------------------------------------------------------ variables
MANY = "9" * 5000


def test_invalid_variables_are_refused() -> None:
    assert variable("N", Count, "a number", {}) is variable("N", Count, "a number", {"N": " "}) is None
    assert variable("N", Count, "a number", {"N": "12"}) == 12
    for bad in ("0", "-1", "two", "1.5", MANY, "\u0663", "1e99", "nan", "\udcff"):
        with pytest.raises(ArgumentError, match="N must be a number, got '.{1,310}$"):
            variable("N", Count, "a number", {"N": bad})
        assert variable("N", Count, environment={"N": bad}) is None


def test_valid_variables_of_launchers_are_used(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    for bad in (MANY, "x", "-1"):
        assert local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": bad, "SLURM_LOCALID": "1"}) == (1, 0)
        assert local_rank({"MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": bad}) == (3, 0)
        assert allocated_ranks({"SLURM_NTASKS": bad, "SLURM_JOB_CPUS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": bad}) == 8
        assert threads_per_rank(1, {"OMP_NUM_THREADS": bad, "SLURM_JOB_NUM_NODES": bad}) == cores
        assert (allocated_ranks({"SLURM_JOB_CPUS_PER_NODE": bad}) or 0) < 1 << 40
    (tmp_path / "nodes").write_bytes(b"n1\nn\xff2\n")
    assert allocated_ranks({"PBS_NODEFILE": str(tmp_path / "nodes")}) == 2


def test_invalid_variables_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, names in product((MANY, "many", ""), LAUNCHERS.values()):
        if names.size:
            monkeypatch.setenv(names.size, said)
            check_launcher(1)


# ------------------------------------------------------------------ the command line
@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run `pdgemm ARGUMENTS` in this process, without a job; return the exit code."""
    monkeypatch.chdir(tmp_path)
    for name in [x for x in os.environ if x.startswith(("OMPI_COMM", "PMI", "SLURM", "PDGEMM"))]:
        monkeypatch.delenv(name)

    def run(*words: str) -> Any:
        monkeypatch.setattr("sys.argv", ["pdgemm", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code

    return run


ASKED = ("--shape", "64,64,64", "--ranks", "4")
STUDY = ("scaling", "strong", *ASKED, "--launch", "true {ranks}", "--out")


COMMANDS = [
    *[("plan", *ASKED, "--machine", "bad"), ("simulate", *ASKED, "--machine", "bad"), ("profile", "bad")],
    *[("profile", "good", "--machine", "bad"), ("plot", "bad", "--out", "r.html")],
    *[(*STUDY, "bad"), (*STUDY, "new", "--machine", "bad")],
]
BAD = [
    f'{{"copy_bandwidth": {HUGE}}}', "[" * 10_000, '{"format": 1, "case": {}, "status": [1e999]}\n', "\udcff", "\0",
    '{"format":\n',
]  # fmt: skip


@pytest.mark.parametrize(("words", "text"), in_turn(COMMANDS, BAD))
def test_a_bad_file_is_one_line_and_exit_code_2(run: Any, words: tuple[str, ...], text: str, capfd: Any) -> None:
    Path("bad").write_text(text, errors="surrogateescape")
    timeline(Path("good"), GOOD)
    assert run(*words) == 2
    told = capfd.readouterr().err
    assert told.startswith("pdgemm: error: ") and told.count("\n") == 1 and len(told) < 1000


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("plan", "--shape", f"{HUGE},2,3"), ("plan", "--shape", f"2x3x{MANY}"), ("plan", "--layers", str(HUGE)),
        ("plan", "--memory", "1e308GB"), ("plan", "--memory", str(HUGE)), ("plan", "--product-grid", f"{HUGE}x1"),
        ("simulate", "--shape", f"{10**13},1,1"), ("plan", "--machine", "/dev/zero"),
        ("scaling strong --out s", "--ranks", f"1,{HUGE}"), ("scaling weak --out s", "--shape", f"{2**61},1,1"),
        ("scaling strong --out s", "--memory-limit", "1e300"), ("scaling shapes --out s", "--ranks", MANY),
    ],
)  # fmt: skip
def test_an_argument_beyond_all_bounds(run: Any, command: str, option: str, value: str, capfd: Any) -> None:
    asked = dict(zip(ASKED[::2], ASKED[1::2])) | {option: value}
    assert run(*command.split(), *(word for pair in asked.items() for word in pair)) == 2
    told = capfd.readouterr().err
    assert told.startswith("pdgemm: error: ") and told.count("\n") == 1


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("odd"), 3), (MemoryError(), 3), (KeyboardInterrupt(), 130)])
def test_unexpected_errors_without_mpi(run: Any, error: Any, code: int, monkeypatch: Any, capfd: Any) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(profile, "load_profile", fail)
    assert run("profile", "x") == code
    assert ("Traceback" in capfd.readouterr().err) == (code == 3)


def test_numbers_of_arguments_beyond_floats() -> None:
    for text in ("1e400", "-1e400", str(HUGE), "1e400j", "1e308/1e-308", "1/0"):
        with pytest.raises(click.BadParameter):
            NUMBER.convert(text, None, None)
    assert NUMBER.convert("inf", None, None) == float("inf")
