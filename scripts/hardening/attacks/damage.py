"""Damaged files: a command refuses them in one line, or computes the right result for their contents."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from problems import TOLERANCE, gemm_error

from attacks.trial import Finding, Trial, judge

BATCH, SECONDS = 25, 12


def json_files(trial: Trial) -> None:
    """Pass damaged machine files, traces and studies to the commands that need no MPI."""
    kind = trial.rng.choice(("machine", "trace", "study", "mixed up"))
    good = originals(trial)
    question = ("--shape", "300,200,100", "--ranks", "6")
    end = time.monotonic() + SECONDS
    for case in range(BATCH) if trial.only is None else [trial.only]:
        if time.monotonic() > end:
            break
        rng = random.Random(f"{trial.seed}:{case}")
        name = {"machine": "m.json", "trace": "t.json", "study": "s.jsonl"}.get(kind) or rng.choice([*good])
        text = good[name]
        if name == "s.jsonl":
            lines = text.splitlines()
            which = rng.randrange(len(lines))
            lines[which : which + 1] = [damaged_json(rng, lines[which]).decode("utf-8", "surrogateescape")]
            made = "\n".join(lines).encode("utf-8", "surrogateescape")
        else:
            made = damaged_json(rng, text)
        (trial.work / "bad").write_bytes(text.encode() if kind == "mixed up" and rng.random() < 0.5 else made)
        commands: dict[str, list[tuple[str, ...]]] = {
            "m.json": [("plan", *question, "--machine", "bad"), ("simulate", *question, "--machine", "bad")],
            "t.json": [("profile", "bad"), ("profile", "bad", "--json")],
            "s.jsonl": [("plot", "bad", "--out", "out.html")],
        }
        arguments = rng.choice(commands[name if kind != "mixed up" else rng.choice([*good])])
        try:
            trial.count(judge(trial.pdgemm(0, *arguments)))
        except Finding as bad:
            kept = trial.folder / f"bad.{case}"
            shutil.copyfile(trial.work / "bad", kept)
            trial.found(bad.kind, f"{' '.join(arguments)} ({kept.name}): {bad}", case)


def originals(trial: Trial) -> dict[str, str]:
    """Return the texts of an intact machine file, trace and study, which are made once in a run of hostile.py."""
    kept = trial.folder.parent / "originals"
    if not (kept / "s.jsonl").exists():
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        trial.store("o.h5:/x", np.ones((60, 60)))
        study = ("scaling", "strong", "--shape", "40,40,40", "--ranks", "1,2", "--repeats", "2", "--machine", "m.json")
        commands: tuple[tuple[str, ...], ...] = (
            ("calibrate", "-o", "m.json"),
            ("multiply", "o.h5:/x", "o.h5:/x", "-o", "o.h5:/z", "--trace", "t.json"),
            (*study, "--out", "s.jsonl"),
        )
        for words in commands:
            judge(trial.pdgemm(2, *words), codes=(0,))
        for name in ("m.json", "t.json", "s.jsonl"):
            shutil.copyfile(trial.work / name, kept / name)
    return {x.name: x.read_text() for x in sorted(kept.iterdir())}


def hdf5_files(trial: Trial) -> None:
    """Load many files, most of them damaged, on the ranks of one job; some files change between check and reading."""
    for number in range(2 * BATCH):
        rng = random.Random(f"{trial.seed}:{number}")
        path, later = trial.work / f"{number}.h5", trial.work / f"{number}.later"
        write(rng, path)
        whole = path.read_bytes()
        if rng.random() < 0.7:
            path.write_bytes(damaged(rng, whole))
        if rng.random() < 0.2:  # the ranks replace the first file by this one
            later.write_bytes(whole[: rng.randrange(len(whole))] if rng.random() < 0.5 else damaged(rng, whole))
        # store the contents that h5py reads, in another process, which a damaged file may crash
        for name in (path.name, later.name):
            if (trial.work / name).exists():
                read_apart(trial.work / name)
    trial.cases("load", 2 * BATCH)


def write(rng: random.Random, path: Path) -> None:
    """Write a small file that consists mostly of metadata."""
    values = np.random.default_rng(rng.getrandbits(32))
    shape = rng.choice(((7, 5), (30, 20), (1, 1), (0, 4), (64, 3)))
    dtype = rng.choice(("f8", "f8", "f4", "c8", "c16", "i1", ">f8", "f2", "i4"))
    matrix = (values.standard_normal(shape) * 20).astype(dtype)
    with h5py.File(path, "w", libver=rng.choice(("earliest", "latest"))) as file:
        kind = rng.choice(("contiguous", "contiguous", "chunked", "gzip", "compact"))
        name = rng.choice(("x", "group/x"))
        if kind == "compact":
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.COMPACT)
            file.create_dataset("made", data=matrix, dcpl=plist)
        elif kind == "contiguous" or not matrix.size:
            file["made"] = matrix
        else:
            file.create_dataset("made", data=matrix, chunks=True, compression="gzip" if kind == "gzip" else None)
        file["made"].attrs["note"] = "x" * rng.choice((1, 300))
        file["other"] = np.arange(9.0)
        if name != "x":
            file.create_group("group")
        file["x"] = h5py.SoftLink("/group/x") if name != "x" else file["made"]
        if name != "x":
            file[name] = file["made"]


def read_apart(path: Path) -> np.ndarray | None:
    """Return the matrix that h5py reads, and store it in FILE.npy; None if h5py raises, crashes or takes too long."""
    said = path.with_name(f"{path.name}.npy")
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        try:
            with h5py.File(path, "r") as file:
                np.save(said, np.array(file["x"]))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return np.load(said) if said.exists() else None


def during_a_command(trial: Trial) -> None:
    """Run a product or a verification of files that are damaged before it or while it runs."""
    rng, work = trial.rng, trial.work
    m, n, k = (rng.choice((5, 40, 300)) for _ in "mnk")
    a, b = trial.operands(m, n, k)
    trial.store("c.h5:/x", a @ b)
    words = rng.choice((("multiply", "a.h5:/x", "b.h5:/x", "-o", "out.h5:/x"), ("verify", *"abc")))
    words = tuple(f"{x}.h5:/x" if len(x) == 1 else x for x in words)
    trial.store("out.h5:/kept", b)
    environment = {}
    if rng.random() < 0.3:
        text = originals(trial)["m.json"]
        (work / "m.json").write_bytes(damaged_json(rng, text))
        environment["PDGEMM_MACHINE"] = "m.json"
    victim = work / f"{rng.choice('abc')}.h5"
    versions = {x: [trial.read(f"{x}.h5:/x")] for x in "ab"}
    new = work / "new"
    new.write_bytes(damaged(rng, victim.read_bytes()))
    at, in_place = rng.choice((0.0, rng.uniform(0.3, 2.5))), rng.random() < 0.5

    def strike() -> None:
        if in_place:
            shutil.copyfile(new, victim)
        else:
            new.replace(victim)

    timer = threading.Timer(at, strike)
    after = read_apart(new)
    if victim.stem in versions and after is not None:
        versions[victim.stem].append(after)
    if at == 0:
        strike()
        versions |= {victim.stem: [x for x in [after] if x is not None]}
    else:
        timer.start()
    try:
        run = trial.pdgemm(rng.randint(1, trial.size), *words, **environment)
    finally:
        timer.cancel()
        timer.join() if at else None
    outcome = judge(run, codes=(0, 1, 2) if words[0] == "verify" else (0, 2))
    trial.unchanged("out.h5:/kept", b)
    if outcome == "right" and words[0] == "multiply":
        found = trial.read("out.h5:/x")
        with np.errstate(all="ignore"):
            pairs = [(x, y) for x in versions["a"] for y in versions["b"] if x.shape[1:] == y.shape[:1]]
            if not any(agrees(found, x, y) for x, y in pairs):
                raise Finding("wrong", "the result is not the product of the matrices in the files")
    trial.count(outcome)


def agrees(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether c is the product a b, or whether damaged elements are too large to judge it."""
    if c.shape != (a.shape[0], b.shape[1]):
        return False
    error = gemm_error(c, 1, a, b)
    return error <= TOLERANCE or not np.isfinite(error) or not np.isfinite(a @ b).all()


# ------------------------------------------------------------------ damage
def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return data with some bytes flipped, overwritten, zeroed, swapped, cut off or added."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        if not made:
            break
        at, length = rng.randrange(len(made)), min(rng.choice((1, 1, 2, 4, 8, 64, 512)), len(made))
        kind = rng.choice(("flip", "flip", "random", "zero", "ones", "swap", "cut", "add"))
        if kind == "flip":
            made[at] ^= 1 << rng.randrange(8)
        elif kind in ("random", "zero", "ones"):
            fill = {"random": rng.randbytes(length), "zero": bytes(length), "ones": b"\xff" * length}[kind]
            made[at : at + length] = fill[: len(made) - at]
        elif kind == "swap":
            to = rng.randrange(len(made))
            made[at : at + length], made[to : to + length] = made[to : to + length], made[at : at + length]
        elif kind == "cut" and rng.random() < 0.3:
            del made[at:]
        elif kind == "add":
            made[at:at] = rng.randbytes(length)
    return bytes(made)


JUNK: tuple[Any, ...] = (None, True, -1, 0, 1, 3, 2**31, 2**63, 2**70, 10**400, 1.5, -0.0, 1e308, np.nan, np.inf)
JUNK += ("", "x", "1", "\ud800", "a" * 5000, (), [], {}, [1, 2, 3], (1, 2), {"a": []})


def damaged_json(rng: random.Random, text: str) -> bytes:
    """Return a JSON document with some values replaced, removed or repeated, or with some bytes damaged."""
    if rng.random() < 0.3:
        return damaged(rng, text.encode())
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 3))):
        node: Any = document
        while True:
            if not isinstance(node, dict | list) or not node:
                break
            key: Any = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.85:
                node = node[key]
                continue
            kind = rng.random()
            if kind < 0.15:
                del node[key]
            elif kind < 0.25 and isinstance(node, list):
                node += [node[key]] * rng.choice((1, 1000))
            elif kind < 0.35 and isinstance(node[key], int | float):
                node[key] = node[key] * rng.choice((-1, 10**9, 10**300, 0))
            else:
                node[key] = deepcopy(rng.choice(JUNK))
            break
    return json.dumps(document).encode()
