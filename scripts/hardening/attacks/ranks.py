"""Many cases in one job, in a trial's folder: `python -m mpi4py ranks.py FAMILY SEED FIRST COUNT SECONDS` on all ranks.

Rank 0 prints a line when a case begins and one when it has ended; a job that ends in between is a finding, or was ended
by the watchdog.  A case depends on its seed and number only, and makes its grids and matrices itself.
"""

from __future__ import annotations

import os
import random
import re
import reprlib
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from mpi4py import MPI

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(ROOT / "tests" / "helpers")]

from problems import grid_shapes  # noqa: E402

from attacks.damage import JUNK, damaged_json  # noqa: E402
from attacks.flips import case  # noqa: E402
from attacks.trial import Finding  # noqa: E402
from pdgemm import (  # noqa: E402
    Batch,
    DistMatrix,
    Plan,
    ProcessGrid,
    errors,
    matmul_batched,
    pdgemm,
    plan,
    redistribute,
    scalapack as sl,
    verify,
)
from pdgemm.errors import PdgemmError  # noqa: E402
from pdgemm.io import hdf5, source  # noqa: E402

WORLD = MPI.COMM_WORLD
MEET = WORLD.Dup()  # for this script's agreements, whose messages cannot match the library's
BETWEEN: MPI.Comm = MPI.COMM_NULL  # an intercommunicator of rank 0 and the others
if WORLD.size > 1:
    BETWEEN = MPI.Intracomm(WORLD.Split(WORLD.rank > 0)).Create_intercomm(0, WORLD, int(WORLD.rank == 0))
INTERNAL = (AssertionError, SystemError, UnboundLocalError, RecursionError, MPI.Exception)  # always errors in the code
Outcome = tuple[str, Any]  # "ok" and the value, or a type and a text


def attempt(work: Callable[[], Any]) -> Outcome:
    try:
        return "ok", work()
    except INTERNAL as bad:
        raise Finding("traceback", f"{type(bad).__name__}: {bad}") from bad
    except Exception as bad:
        return type(bad).__name__, re.sub("0x[0-9a-f]+", "0x", str(bad))


def agreed(outcome: Outcome) -> str:
    """Return "right" or "refused" if all ranks have this outcome; else raise Finding."""
    said = MEET.allgather((outcome[0], outcome[1] if outcome[0] != "ok" else ""))
    if len({*said}) > 1:
        other = next(x for x in said if x != said[0])
        raise Finding("wrong", f"ranks ended differently: {said[0]}, {other}")
    return "right" if outcome[0] == "ok" else "refused"


# ------------------------------------------------------------------ keys
def keyed(rng: random.Random, say: Callable[[str], None]) -> str:
    """Compare A[key] and A[key] = value with NumPy's on the whole matrix; a key that NumPy refuses must be refused."""
    comm = WORLD.Dup()
    values = np.random.default_rng(rng.getrandbits(32))
    x = values.standard_normal((rng.choice((0, 1, 2, 5, 13, 40)), rng.choice((0, 1, 3, 8, 30))))

    def part(n: int) -> Any:
        some = [rng.randint(-n, n - (rng.random() < 0.95)) for _ in range(rng.randrange(1, 6) if n else 0)]
        ends = rng.choice((None, rng.randint(-n - 1, n + 1))), rng.choice((None, rng.randint(-n - 1, n + 1)))
        kinds = [slice(*ends), slice(*ends, rng.choice((1, 2, 3, -1, -2))), some, values.random(n) < 0.5]
        return rng.choice([*kinds, *some[:1]])

    rows, cols = part(x.shape[0]), part(x.shape[1])
    listed = all(isinstance(side, (list, np.ndarray)) for side in (rows, cols))
    key = np.ix_(rows, cols) if listed else rng.choice(((rows, cols), rows, (..., cols)))
    layout: dict[str, Any] = {"block": rng.choice((None, 1, (3, 2), (7, 64))), "order": rng.choice("CF")}
    with ProcessGrid(comm, rng.choice(grid_shapes(comm.size))) as grid:
        A = DistMatrix.from_global(x, grid=grid, **layout)
        A = A if rng.random() < 0.5 else A.copy()  # in memory that other ranks can read, or not
        if turned := rng.random() < 0.3 and key is rows:
            A, x, key = A.T, x.T, (slice(None), key)
        say(f"{x.shape} {layout} A[{key}]{' of a transpose' * turned}")
        expected, outcome = attempt(lambda: x[key]), attempt(lambda: A[key])
        if agreed(outcome) == "refused" or expected[0] != "ok":
            if (outcome[0] == "ok") != (expected[0] == "ok"):
                raise Finding("wrong", f"NumPy: {expected}, the matrix: {outcome}")
            return "refused"
        found = outcome[1].allgather() if isinstance(outcome[1], DistMatrix) else outcome[1]
        if not same(np.asarray(found), np.asarray(expected[1])):
            raise Finding("wrong", "the elements differ from NumPy's")
        shape = np.shape(expected[1])
        value = values.standard_normal(rng.choice((shape, shape[-1:], ())))
        matrix = value.ndim == 2 and rng.random() < 0.5
        x = x.copy()
        x[key] = value
        outcome = attempt(lambda: A.__setitem__(key, DistMatrix.from_global(value, grid=grid) if matrix else value))
        if agreed(outcome) == "refused" or not np.array_equal(A.allgather(), x):
            raise Finding("wrong", f"assigned {value.shape}, a matrix: {matrix}: {outcome}")
    comm.Free()
    return "right"


# ------------------------------------------------------------------ damaged files
def load(rng: random.Random, say: Callable[[str], None], number: int) -> str:
    """Load NUMBER.h5; if there is a NUMBER.later, it replaces the file while the file is read."""
    path, later = Path(f"{number}.h5"), Path(f"{number}.later")
    said = [np.load(f"{x}.npy") for x in (path.name, later.name) if Path(f"{x}.npy").exists()]
    transpose, block = rng.random() < 0.3, rng.choice((None, 1, (5, 3)))
    change = rng.choice((shutil.copyfile, os.replace))
    say(f"{path} {', then ' + change.__name__ + ' of ' + str(later) if later.exists() else ''}")
    changes, module = later.exists(), cast(Any, source)
    stored_dataset = module.stored_dataset

    def strike(*args: Any) -> Any:
        stored = stored_dataset(*args)
        change(later, path)
        return stored

    with ProcessGrid(WORLD) as grid:
        module.stored_dataset = strike if changes else stored_dataset
        try:
            outcome = attempt(lambda: hdf5.load(path, "x", grid, block, transpose=transpose))
        finally:
            module.stored_dataset = stored_dataset
        if agreed(outcome) == "refused":
            if not issubclass(getattr(errors, outcome[0], Exception), PdgemmError):
                raise Finding("traceback", f"{outcome[0]}: {outcome[1]}")
            return "refused"
        found = outcome[1].allgather()
        found = found.T if transpose else found
        if not any(same(found, x) for x in said):
            raise Finding("wrong", f"a {found.shape} {found.dtype} matrix that differs from the one h5py reads")
    return "right"


def same(found: np.ndarray, said: np.ndarray) -> bool:
    return found.shape == said.shape and np.array_equal(found, said, equal_nan=found.dtype.kind in "fc")


# ------------------------------------------------------------------ arguments
class Junk:
    """An invalid argument, which fails as a callback, too."""

    def __repr__(self) -> str:
        return "Junk()"

    def __call__(self, *args: object, **options: object) -> Any:
        raise RuntimeError("a callback's own")


WRONG: list[Any] = [*JUNK, Junk(), b"x", Ellipsis, np.zeros(3), np.array([["a"]]), np.array([[None]], object)]
WORDS = ("N", "T", "F", "summa", "2.5d", "auto", "ring", "shared", "float32", "f4", "O", ">f8", "S3", "host", "cuda")
N = 12


def function(i: Any, j: Any) -> Any:
    return i + 2.0 * j


class Calls:
    """Calls of library functions with valid arguments, and their right results; a case changes one of these calls."""

    def __init__(self, comm: MPI.Intracomm, rng: random.Random) -> None:
        self.comm, self.rng = comm, rng
        self.grid = ProcessGrid(comm)
        self.a = function(np.arange(N)[:, None], np.arange(N)[None, :])
        self.A, self.B = (
            DistMatrix.from_function(function, (N, N), grid=self.grid, block=block) for block in (None, 5)
        )
        self.alike = self.a.copy()
        self.C = DistMatrix.zeros((N, N), grid=self.grid, block=4)
        thin = DistMatrix.zeros((3, 4), grid=self.grid, dtype="c16")
        self.others: list[Any] = [self.A.T, self.A[1:, :], self.A.H, thin, thin.H]

    def any(self) -> tuple[str, Callable[..., Any], dict[str, Any], Any]:
        """Return a random one of the calls: a name, the function, its arguments by name, and the right result."""
        A, B, C, a, grid = self.A, self.B, self.C, self.a, self.grid
        made: dict[str, Any] = {"grid": grid, "block": None, "source": (0, 0)}
        asked: dict[str, Any] = {"algorithm": "auto", "lookahead": 1, "mover": "auto", "check": True}
        none = ("shape", "layers", "panel_width", "memory_limit", "accumulate_dtype", "compute_type", "machine")
        asked |= dict.fromkeys(none)
        scalars = {"alpha": 1.0, "A": A, "B": B, "beta": 0.0, "transa": "N", "transb": "N"}
        loads = {"path": "in.h5", "name": "x", "grid": grid, "block": None, "source": (0, 0), "dtype": None}
        move = {"X": A, "out": None, "alpha": 1, "beta": 0, "block": 3, "source": (0, 0), "order": "C", "dtype": None}
        saves = {"path": "out.h5", "name": "x", "matrix": A, "check": True, "chunks": None, "compression": None}
        whole = {"array": a, "root": self.rng.choice((None, 0, 1)), "device": "host"}
        shape = {"comm": self.comm, "shape": None, "layers": 1, "ranks": None}
        local, size = A.local.copy(), self.comm.size
        items = np.ones((2, 3, 3))

        def assign(key: Any, value: Any) -> Any:
            C[key] = value
            return C

        at5 = DistMatrix.from_function(function, (N, N), grid=grid, block=5, order="F").local
        desc = sl.descinit(N, N, 5, 5, 0, 0, sl.context(grid), max(1, at5.shape[0]))
        nineteen = {"transa": "N", "transb": "N", "m": N, "n": N, "k": N, "alpha": 1.0, "a": at5, "ia": 1, "ja": 1}
        nineteen |= {"desca": desc, "b": at5, "ib": 1, "jb": 1, "descb": desc, "beta": 0.0, "c": at5 * 0, "ic": 1}

        def scalapack(**x: Any) -> Any:
            sl.pdgemm(*x.values())
            return DistMatrix.from_local(x["c"], (N, N), grid=grid, block=5)

        def batched(**x: Any) -> Any:
            return matmul_batched(Batch.from_local(**x), Batch.from_local(items, self.comm)).items

        calls: list[tuple[str, Callable[..., Any], dict[str, Any], Any]] = [
            ("pdgemm", pdgemm, scalars | asked | {"C": None, "progress": None}, a @ a),
            ("pdgemm C", pdgemm, scalars | asked | {"C": C, "progress": lambda done, total: None}, a @ a),
            ("plan", lambda **x: plan(**x).problem.size, {"A": A, "B": B, "C": C, "beta": 0.0} | asked, size),
            ("execute", lambda **x: plan(A, B, C).execute(**x), {"A": A, "B": B, "C": C, "alpha": 1, "beta": 0}, a @ a),
            ("prepare", lambda **x: plan(A, B, C).prepare(**x)(), {"A": A, "B": B, "C": C, "alpha": 1}, a @ a),
            ("from_json", lambda text: Plan.from_json(text).execute(A, B, C), {"text": plan(A, B, C).to_json()}, a @ a),
            ("redistribute", redistribute, move | {"memory_limit": None, "check": True}, a),
            ("verify", lambda **x: verify(**x).passed, {"C": A, "alpha": 0, "A": A, "B": B, "beta": 1, "C0": A}, True),
            ("empty", lambda **x: DistMatrix.empty(**x).shape, {"shape": (N, N), "dtype": "f8"} | made, (N, N)),
            ("from_function", DistMatrix.from_function, {"f": function, "shape": (N, N)} | made, a),
            ("from_global", DistMatrix.from_global, whole | made, a),
            ("from_global of all", DistMatrix.from_global, {"array": self.alike, "device": "host"} | made, a),
            ("from_local", DistMatrix.from_local, {"local": local, "shape": (N, N)} | made, a),
            ("eye", DistMatrix.eye, {"n": N, "dtype": "f8"} | made, np.eye(N)),
            ("random", lambda **x: DistMatrix.random(**x).shape, {"shape": (N, N), "seed": 3} | made, (N, N)),
            ("to_global", lambda **x: self.comm.bcast(A.to_global(**x)), {"root": 0}, a),
            ("allgather", lambda: A.allgather(), {}, a),
            ("norm", lambda **x: A.norm(**x), {"kind": "max"}, 33.0),
            ("allclose", lambda **x: A.allclose(**x), {"other": A, "rtol": 1e-5, "atol": 1e-8}, True),
            ("setitem", assign, {"key": slice(0, N), "value": A}, a),
            ("to_device", lambda **x: A.to_device(**x), {"device": "host"}, a),
            ("matmul", lambda x, y: x @ y, {"x": A, "y": B}, a @ a),
            ("load", hdf5.load, loads | {"transpose": False, "verify": False, "device": "host", "progress": None}, a),
            ("save", lambda **x: hdf5.save(**x).shape, saves | {"progress": None}, (N, N)),
            ("grid", lambda **x: ProcessGrid(**x).size, shape, size),
            ("scalapack", scalapack, nineteen | {"jc": 1, "descc": desc}, a @ a),
            ("batch", batched, {"items": items, "comm": self.comm}, items * 3),
        ]  # fmt: skip
        return self.rng.choice(calls)

    def wrong(self, value: Any) -> Any:
        """Return another value for this argument, most often an invalid one."""
        rng = self.rng
        if (
            value is self.alike and self.comm.size > 1 and rng.random() < 0.8
        ):  # an array that must be the same on every rank
            other = value.copy()
            other[rng.randrange(N), rng.randrange(N)] += 1
            return other
        if isinstance(value, DistMatrix) and rng.random() < 0.5:
            return rng.choice(self.others)
        if isinstance(value, str) and value.startswith("{"):
            return damaged_json(rng, value).decode(errors="replace")
        if isinstance(value, str) and rng.random() < 0.6:
            return rng.choice((*WORDS, value + "x", value[: len(value) // 2]))
        if isinstance(value, MPI.Comm) and rng.random() < 0.5:
            return rng.choice((MPI.COMM_SELF, MPI.COMM_NULL, MPI.COMM_WORLD, BETWEEN))
        if callable(value) or (value is None and rng.random() < 0.2):
            return Junk()
        return rng.choice(WRONG)


def deviate(rng: random.Random, say: Callable[[str], None]) -> str:
    """Call a function on all ranks, mostly with a fault.

    The fault is a wrong argument, on one rank or on all, or one rank calls another function or none.
    """
    comm = WORLD.Dup()
    calls = Calls(comm, rng)
    if comm.rank == 0 and not Path("in.h5").exists():
        import h5py

        with h5py.File("in.h5", "w") as file:
            file["x"] = calls.a
    MEET.Barrier()
    name, function, arguments, expected = calls.any()
    one = rng.randrange(comm.size)
    who: Any = rng.choice((one, one, one, one, "all", "all", "no"))
    here = who in (comm.rank, "all")
    how = rng.choice(("value",) * 16 + ("none", "other")) if arguments and who == one else "value"
    if how == "value" and arguments:
        which = rng.choice([*arguments])
        instead = calls.wrong(arguments[which])
        text = f"{which}={reprlib.repr(instead)}"
        if here:
            arguments = arguments | {which: instead}
    else:
        other = calls.any()
        text = "no call" if how == "none" else f"{other[0]} instead"
        if here:
            _, function, arguments, _ = other if how == "other" else (0, lambda: None, {}, 0)
    say(f"{name}, with {text} on {f'rank {who} of {comm.size}' if who == one else f'{who} rank'}")
    outcome = attempt(lambda: function(**arguments))
    if agreed(outcome) == "refused":
        if who == "no":
            raise Finding("code", f"refused: {outcome}")
        if name == "from_json" and not issubclass(getattr(errors, outcome[0], Exception), PdgemmError):
            raise Finding("traceback", f"{outcome[0]}: {outcome[1]}")
        return "refused"
    if who != "all" or name == "from_json":  # no error was raised, so the result must be the right one
        value = outcome[1].allgather() if isinstance(outcome[1], DistMatrix) else outcome[1]
        right = value is not None and np.shape(value) == np.shape(expected) and np.allclose(value, expected)
        if not all(MEET.allgather(bool(right))):
            raise Finding("wrong", f"accepted, but not the result that the other ranks expect: {reprlib.repr(value)}")
    calls.grid.free()
    comm.Free()
    return "right"


# ------------------------------------------------------------------ files of save_all
def state(rng: random.Random, say: Callable[[str], None], number: int) -> str:
    """Flip a bit in the newer of two saved states, most often in its metadata: one must be loaded completely."""
    path, comm = Path(f"state.{number}.h5"), WORLD.Dup()
    values = np.random.default_rng(rng.getrandbits(32))
    shapes = {rng.choice(("w", "v/w", "ü")): (3, 4), "x": (rng.randrange(3), 5), "a/b/c": (8, 8)}
    saved = [{name: values.standard_normal(shape) for name, shape in shapes.items()} for _ in range(3)]
    with ProcessGrid(comm) as grid:

        def save(step: int) -> None:
            matrices = {name: DistMatrix.from_global(x, grid=grid, block=2) for name, x in saved[step].items()}
            hdf5.save_all(path, matrices, attrs={"step": step, "name": "x" * rng.randrange(99)}, keep=2)

        def whole(step: int) -> bool:
            said = hdf5.load_all(path, grid)
            same = {name: np.array_equal(x.allgather(), saved[step].get(name, 0)) for name, x in said.matrices.items()}
            return said.attrs["step"] == step and {*same} == {*shapes} and all(same.values())

        save(0)
        save(1)
        bit = 8 * rng.randrange(4096) + rng.randrange(8)
        say(f"{path}, bit {bit}")
        if MEET.rank == 0:
            data = bytearray(path.read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            path.unlink()  # the older generation may be a link to the same file
            path.write_bytes(data)
        MEET.Barrier()
        step = hdf5.load_all(path, grid).attrs["step"]
        if not whole(step):
            raise Finding("lost", f"the loaded state is not all of generation {step + 1}")
        save(2)
        if not whole(2):
            raise Finding("lost", "after the flip a third state was saved, but another one is loaded")
    comm.Free()
    return "right" if step else "refused"


# ------------------------------------------------------------------ the job
def main() -> None:
    family, seed, first, count, seconds = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
    end = time.monotonic() + seconds
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for number in range(first, count):
        if MEET.bcast(time.monotonic() > end) and number > first:
            break

        def line(word: str, text: str, number: int = number) -> None:
            if MEET.rank == 0:
                print("case", number, word, " ".join(text.split()), flush=True)

        said: list[str] = []

        def say(text: str) -> None:
            said.append(text)  # noqa: B023
            line("begins", text)

        rng = random.Random(f"{family}:{seed}:{number}")
        more = (number,) if family in ("load", "state") else ()
        try:
            families: dict[str, Any] = {"load": load, "deviate": deviate, "state": state}
            families |= {"keyed": keyed, "flip": partial(case, MEET)}
            outcome = families[family](rng, say, *more)
            line(outcome, "")
        except Finding as bad:
            # perhaps raised on this rank only: the ranks may be out of step, so the job ends
            time.sleep(0.3 * (MEET.rank > 0))
            print("case", number, bad.kind, " ".join(f"{''.join(said)}: {bad}".split()), flush=True)
            sys.stderr.flush()
            WORLD.Abort(9)


if __name__ == "__main__":
    main()
