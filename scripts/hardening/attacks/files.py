"""Paths that are not plain files, and odd names: no file is lost, and only the output is changed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from attacks.trial import Finding, Trial, judge

ODD = ("fifo", "device", "folder", "dangling", "loop", "link", "hard link", "read-only", "long name", "empty", "text")
NAMES = (" x .h5", "-o.h5", "ä☃.h5", "a\nb.h5", "%s{}.h5", "'q\".h5", "\udcff.h5", "a:b.h5", "*", "..h5", "~", "$HOME")


def odd(trial: Trial, kind: str, path: Path) -> Path:
    """Create a file of a kind such as "fifo" or "folder" at a path, and return the path to use."""
    target = trial.work / "target.h5"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        with suppress(PermissionError):  # a user namespace has no devices
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(trial.work / "nowhere" / "x.h5")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind in ("link", "hard link"):
        trial.store("target.h5:/kept", trial.matrix((5, 4)))
        trial.store("target.h5:/x", trial.matrix((30, 30)))
        path.symlink_to(target) if kind == "link" else path.hardlink_to(target)
    elif kind == "read-only":
        folder = trial.work / "ro"
        folder.mkdir()
        trial.mount(folder, 1 << 20, "ro")
        return folder / path.name
    elif kind == "long name":
        return trial.work / ("n" * trial.rng.choice((240, 255, 256)) + path.suffix)
    elif kind in ("empty", "text"):
        path.write_text("" if kind == "empty" else "not what you look for\n")
    return path


def odd_files(trial: Trial) -> None:
    """A file argument of a command is not a plain file, or has an odd name."""
    rng, work = trial.rng, trial.work
    a, b = trial.operands(30, 30, 20)
    question, product = ("--shape", "9,9,9", "--ranks", "4"), ("multiply", "a.h5:/x", "b.h5:/x", "-o")
    scaling = ("scaling", "strong", "--shape", "9,9,9", "--ranks", "1", "--repeats", "1", "--no-calibrate")
    words, suffix = rng.choice(
        (
            ((*product, "{}:/z"), ".h5"),
            ((*product, "{}:/z"), ".h5"),
            ((*product, "c.h5:/z", "--trace", "{}"), ".json"),
            (("multiply", "{}:/x", "b.h5:/x", "-o", "c.h5:/z"), ".h5"),
            (("generate", "{}:/z", "--shape", "9x9"), ".h5"),
            (("verify", "a.h5:/x", "b.h5:/x", "{}:/x"), ".h5"),
            (("calibrate", "-o", "{}"), ".json"),
            (("plan", *question, "--machine", "{}"), ".json"),
            (("profile", "{}"), ".json"),
            (("plot", "{}", "--out", "report.html"), ".jsonl"),
            (("plot", "study.jsonl", "--out", "{}"), ".html"),
            ((*scaling, "--out", "{}"), ".jsonl"),
        )
    )
    if "study.jsonl" in words:
        judge(trial.start(0, *scaling, "--out", "study.jsonl").finish(), codes=(0,))
    if rng.random() < 0.25:
        kind, path = "name", work / rng.choice(NAMES)
    else:
        kind = rng.choice(ODD)
        path = odd(trial, kind, work / f"odd{suffix}")
    name = path.name if path.parent == work else str(path)
    before = {x: look(x) for x in work.iterdir()}
    size = 0 if words[0] in ("plan", "profile", "plot", "scaling") else rng.randint(1, trial.size)
    trial.commands.append(f"# {kind}")
    run = trial.start(size, *(x.replace("{}", name) for x in words)).finish()
    outcome = judge(run)
    writes = "-o" in words[-2:] or words[-2:-1] in (("--out",), ("--trace",)) or words[0] == "generate"
    for x, was in before.items():
        is_target = writes and (x == path or (x.name == "target.h5" and kind in ("link", "hard link")))
        if look(x) != was and not (is_target and outcome == "right" and kind not in ("fifo", "device", "folder")):
            raise Finding("lost", f"{x.name} was {was[:3]}, is {look(x)[:3]}")
    if outcome == "right" and kind in ("fifo", "device", "folder", "dangling", "loop", "read-only"):
        raise Finding("wrong", f"exit code 0, though {name} is {kind}")
    if outcome == "right" and words[:1] == ("multiply",) and "{}:/x" not in words:
        target = name if words[-1] == "{}:/z" else "c.h5"
        trial.is_product(f"{target}:/z", 1, a, b)
        if kind == "link" and words[-1] == "{}:/z" and not path.is_symlink():
            raise Finding("lost", "the link is gone")
    trial.count(outcome)


def look(path: Path) -> tuple[object, ...]:
    """Return the state of a path: its type, its device number, the target of a link, and its contents."""
    try:
        here = path.lstat()
    except OSError:
        return ("nothing",)
    holds = path.read_bytes() if stat.S_ISREG(here.st_mode) else b""
    return stat.S_IFMT(here.st_mode), here.st_rdev, os.readlink(path) if path.is_symlink() else "", holds
