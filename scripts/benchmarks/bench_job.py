#!/usr/bin/env python3
"""From file to file, in turns: `pdgemm multiply` on ranks of this machine, and one process of h5py and NumPy.

    . scripts/env.sh
    python scripts/benchmarks/bench_job.py --sizes 512,4096,8192 [--ranks 2] [--different] [--folder DIR]
    python scripts/benchmarks/bench_job.py --sizes 8192 --with '--memory 100MiB' --with '--checkpoint 2s'

Each is a job from its start to its end: interpreter, imports, reading, product, writing.  NumPy has as many threads as
there are ranks; its files are not checked, and not written to the disk when it ends, as those of `multiply` are
(`--sync` makes it do that).  The matrices are in the page cache.  Without --different A and B are one dataset.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import click

NUMPY = """
import json, os, sys, time
spent = {}
def lap(name, last=[time.time()]):
    spent[name], last[0] = time.time() - last[0], time.time()
import h5py
a, b, c, sync = sys.argv[1:]
lap("imports")
def read(name):
    path, dataset = name.split(":")
    with h5py.File(path) as file:
        return file[dataset][()]
A = read(a)
B = A if b == a else read(b)
lap("read")
C = A @ B
lap("product")
path, dataset = c.split(":")
with h5py.File(path, "w") as file:
    file[dataset] = C
    file.flush()
    if sync == "True":
        os.fsync(file.id.get_vfd_handle())
lap("write")
print(json.dumps(spent))
"""
PHASES = "start", "read", "product", "write", "save", "all"  # the start with all else, such as the end


def run(words: list[str], **environment: str) -> tuple[float, dict[str, Any]]:
    """Return the seconds of a command, and the JSON object that it prints."""
    start = perf_counter()
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False)
    seconds = perf_counter() - start
    if done.returncode:
        raise click.ClickException(done.stdout + done.stderr)
    return seconds, json.loads(done.stdout)


def numpy(a: str, b: str, c: str, threads: int, sync: bool) -> dict[str, float]:
    seconds, spent = run([sys.executable, "-c", NUMPY, a, b, c, str(sync)], OMP_NUM_THREADS=str(threads))
    return with_start(seconds, {name: spent[name] for name in ("read", "product", "write")})


def pdgemm(a: str, b: str, c: str, ranks: int, options: str) -> dict[str, float]:
    words = ["mpiexec", "-n", str(ranks), sys.executable, "-m", "pdgemm", "multiply", a, b, "-o", c, "--json"]
    seconds, facts = run([*words, *options.split()], OMP_NUM_THREADS="1")
    product = facts["product"]
    if "read_wait" in product:  # reading and writing are parts of the product: the waits for them
        waits = {"read": product["read_wait"], "write": product["write_wait"], "save": product["save_seconds"]}
        return with_start(seconds, {**waits, "product": product["seconds"] - sum(waits.values())})
    inside = {
        "read": sum(x["seconds"] for x in facts["read"]),
        "product": facts["product"]["per_rank"]["seconds"]["max"],
        "write": facts["wrote"]["seconds"],
    }
    return with_start(seconds, inside)


def with_start(seconds: float, inside: dict[str, float]) -> dict[str, float]:
    return {"start": seconds - sum(inside.values()), **{x: inside.get(x, 0.0) for x in PHASES[1:-1]}, "all": seconds}


@click.command()
@click.option("--sizes", default="512,2048,4096,8192", show_default=True)
@click.option("--ranks", default=2, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--different", is_flag=True, help="A and B are two datasets.")
@click.option("--sync", is_flag=True, help="NumPy's file is written to the disk, too.")
@click.option("--with", "more", multiple=True, help="Options of `pdgemm multiply`, for a turn with them.")
@click.option("--folder", type=click.Path(exists=True), help="Where the files are; default: a temporary folder.")
@click.option("--json", "path", type=click.Path(), help="Write all seconds to this file.")
def main(
    sizes: str,
    ranks: int,
    repeats: int,
    different: bool,
    sync: bool,
    more: tuple[str, ...],
    folder: str | None,
    path: str | None,
) -> None:
    """Print the medians of the seconds as a table, and pdgemm's over NumPy's."""
    every: list[dict[str, Any]] = []
    jobs = ["numpy", "pdgemm", *(f"pdgemm {options}" for options in more)]
    print("| size | job |", " | ".join(PHASES), "|\n|---|---|" + "---|" * len(PHASES))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for size in map(int, sizes.split(",")):
            a, b = f"{place}/a.h5:/X", f"{place}/{'b' if different else 'a'}.h5:/X"
            for seed, name in enumerate(sorted({a, b})):
                shape, made = f"{size}x{size}", ["--seed", str(seed), "--force"]
                subprocess.run(["pdgemm", "generate", name, "--shape", shape, *made], stdout=sys.stderr, check=True)
            for turn in range(repeats + 1):  # the first is not counted
                for who in jobs:
                    c = f"{place}/c.h5:/C"
                    Path(c.partition(":")[0]).unlink(missing_ok=True)
                    options = who.removeprefix("pdgemm")
                    found = numpy(a, b, c, ranks, sync) if who == "numpy" else pdgemm(a, b, c, ranks, options)
                    if turn:
                        every.append({"size": size, "who": who, **found})
            medians = {
                who: {x: statistics.median(r[x] for r in every if (r["size"], r["who"]) == (size, who)) for x in PHASES}
                for who in jobs
            }
            for who, seconds in medians.items():
                print(f"| {size} | {who} |", " | ".join(f"{seconds[x]:.2f} s" for x in PHASES), "|")
            for who in jobs[1:]:
                ratios = [medians[who][x] / max(1e-3, medians["numpy"][x]) for x in PHASES]
                print(f"| {size} | {who} / numpy |", " | ".join(f"{x:.2f}" for x in ratios), "|", flush=True)
            for each in Path(place).iterdir():
                each.unlink()
    if path:
        Path(path).write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
