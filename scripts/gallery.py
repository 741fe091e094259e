#!/usr/bin/env python3
"""Run the examples of docs/examples on 4 ranks, and write their gallery: README.md and the pictures.

    . scripts/env.sh; python scripts/gallery.py

The gallery has the docstring and the output of each example.  One more picture shows the losses of gpt/train.py in six
layouts, for docs/gpt.md.
"""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
ON_RANKS = "mpirun -n 4 python -m pdgemm docs/examples/{}.py"
COMMANDS = {  # in the order of the gallery; the last command of each runs the example
    "pca": [ON_RANKS],
    "pca_file": [ON_RANKS],
    "nearest_neighbours": [
        "mpirun -n 4 pdgemm multiply digits.h5:/X digits.h5:/X --transb T -o similarity.h5:/S --verify",
        "python docs/examples/{}.py",
    ],
    "randomized_svd": [ON_RANKS],
    "newton_schulz": [ON_RANKS],
    "pagerank": [ON_RANKS],
    "gaussian_process": [ON_RANKS],
    "vibrating_plate": [ON_RANKS],
    "least_squares": [ON_RANKS],
    "digits": [f"{ON_RANKS} --picture digits.png"],
    "boosted_trees": [f"{ON_RANKS} --missing 0.1 --picture boosted_trees.png"],
    "ccsd_ladder": [ON_RANKS],
    "rpa": [ON_RANKS],
    "tensor_network": [ON_RANKS],
}
LAYOUTS = {  # the ranks and the options of gpt/train.py
    "1 process": (1, "--microbatches 4"),
    "dp 4, ZeRO 3": (4, "--dp 4 --zero 3"),
    "tp 4": (4, "--tp 4"),
    "pp 4, zero bubble": (4, "--pp 4 --microbatches 4 --schedule zero_bubble"),
    "cp 2 x tp 2": (4, "--cp 2 --tp 2"),
    "dp 2 x tp 2 x pp 2": (8, "--dp 2 --tp 2 --pp 2 --microbatches 2 --recompute blocks"),
}
GPT = "--steps 100 --layers 4 --hidden 32 --sequence 32 --batch 8 --rate 0.002 --dtype float64"
BEGINNING = """\
<!-- written by scripts/gallery.py -->
# Examples

Each example is a short program to copy and change.  It runs on any number of ranks, with or without `mpirun`, and
writes into the current folder, or where its arguments say.  Install what the examples need by
`pip install '.[mpi,demo]'`.  The test suite runs all of them on 2 ranks, and compares their results with those
of NumPy, SciPy and scikit-learn.
"""
END = """\
## scaling_study.sh

A strong and a weak scaling study in Slurm, and the report of both.  [The script](scaling_study.sh) submits three of the
job scripts in `slurm/`, each of which waits for the previous one: growing numbers of ranks multiply the same matrices,
then matrices that grow with the ranks, and then `pdgemm plot` draws measured and predicted values.  First
set in a [site file](../../slurm/README.md) how ranks start on your cluster.

<!-- not run: it needs Slurm; tests/cluster/test_slurm_studies.py submits it -->
```console
$ ALLOCATION='-N 4 --ntasks-per-node=8' RANKS=1,2,4,8,16,32 docs/examples/scaling_study.sh study
```

`scripts/study.sh --ranks 1,2` does the same without Slurm.  This is the beginning of its report, from two cores of an
AMD EPYC on 24 November 2026; times on more than 2 ranks are predicted:

![Time and efficiency of a product, measured on 1 and 2 ranks and predicted to 4096](pictures/scaling_study.png)

## notebook.ipynb

Products from a notebook: [notebook.ipynb](notebook.ipynb) starts four MPI engines by ipyparallel, which multiply
matrices together, and gets the result from them.  It needs `pip install '.[mpi,notebook]'`.

## All pictures again

<!-- not run: it writes this page -->
```console
$ python scripts/gallery.py
```
"""


def text_of(name: str) -> tuple[str, str]:
    """Return the first line of an example's docstring, and the rest."""
    doc = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    title, _, rest = doc.partition("\n\n")
    return title, rest


def page(outputs: dict[str, str]) -> str:
    """Return the text of the gallery.   outputs : {name of an example: its output}."""
    texts = {name: text_of(name) for name in COMMANDS}
    rows = [f"| ![{x}](pictures/{name}.png) | [{name}.py]({name}.py): {x} |" for name, (x, _) in texts.items()]
    parts = [BEGINNING, "\n".join(["| | |", "|---|---|", *rows, ""])]
    for name, (title, rest) in texts.items():
        *before, command = (x.format(name) for x in COMMANDS[name])
        first = "".join(f"```bash\n{x}\n```\n\n" for x in before)
        parts.append(f"## {name}.py\n\n{title}\n\n{rest}\n\n{first}```console\n$ {command}\n{outputs[name]}```\n")
    return "\n".join([*parts, END])


def train_gpt(path: str, *words: str) -> None:
    """Run gpt/train.py, and save the loss and the norm of the gradients of each step."""
    sys.path.insert(0, str(EXAMPLES / "gpt"))
    gpt: Any = __import__("train")
    reports = [(run.report.loss, run.report.norm, run.mesh.rank) for run in gpt.training(words)]
    if reports[0][2] == 0:
        np.savetxt(path, np.array(reports)[:, :2])


def draw_layouts(path: Path, folder: Path) -> None:
    """Train gpt/train.py in six layouts, and draw its losses and the norms of its gradients."""
    runs = {}
    for name, (ranks, options) in LAYOUTS.items():
        losses = folder / "losses.txt"
        program = f"python -m pdgemm {__file__} {losses} {options} {GPT}"
        subprocess.run(shlex.split(f"mpirun --oversubscribe -n {ranks} {program}"), cwd=folder, check=True)
        runs[name] = np.loadtxt(losses).T
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots(1, 2)
    for at, what in enumerate(("loss", "norm of the gradients")):
        draw_curves(axes[at], {name: (np.arange(1, 1 + len(x[at])), x[at]) for name, x in runs.items()})
        title = f"relative difference at most {most_different(axes[at]):.0e}"
        axes[at].set(xlabel="step", ylabel=what, yscale="log" if at else "linear")
        axes[at].set_title(title, fontsize="medium")
    axes[0].legend(loc="upper right", handlelength=4, fontsize="small")
    figure.savefig(path, dpi=100)


def draw_curves(axes: Any, curves: dict[str, Any]) -> None:
    """Draw the first curve as a wide grey line, and the others on it in alternating dashes."""
    for number, (name, (x, y)) in enumerate(curves.items()):
        style: Any = {"label": name, "color": "lightgrey", "linewidth": 4}
        if number:
            dashes = 5 * (number - 1), (5, 5 * (len(curves) - 2))
            style |= {"color": f"C{number - 1}", "linewidth": 1.3, "linestyle": dashes}
        axes.plot(x, y, **style)


def most_different(axes: Any) -> float:
    """Return the largest relative difference of curves from the first one."""
    first, *others = (line.get_ydata() for line in axes.lines)
    return max(float(np.abs(y / first - 1).max()) for y in others)


def store(source: Path, name: str) -> None:
    """Write a picture of the gallery with a palette, which halves its size."""
    with Image.open(source) as picture:
        picture.convert("RGB").quantize(160).save(EXAMPLES / "pictures" / f"{name}.png", optimize=True)


def main() -> None:
    """Run all examples in a temporary folder, and write the gallery."""
    outputs = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, commands in COMMANDS.items():
            for command in commands:
                words = shlex.split(command.format(name).replace("docs/examples", str(EXAMPLES)))
                run = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
            outputs[name] = run.stdout
            store(Path(folder) / f"{name}.png", name)
            print(name, outputs[name], sep="\n")
        draw_layouts(picture := Path(folder) / "gpt_curves.png", Path(folder))
        store(picture, picture.stem)
    (EXAMPLES / "README.md").write_text(page(outputs))


if __name__ == "__main__":
    train_gpt(*sys.argv[1:]) if len(sys.argv) > 1 else main()
