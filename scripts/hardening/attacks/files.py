"""Files that are no plain files, odd names: nothing is lost and nothing else is touched."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import h5py

from attacks.trial import Finding, Trial, judge

ODD = ("fifo", "device", "folder", "dangling", "loop", "link", "hard link", "read-only", "long name", "empty", "text")
NAMES = (" x .h5", "-o.h5", "ä☃.h5", "a\nb.h5", "%s{}.h5", "'q\".h5", "\udcff.h5", "a:b.h5", "*", "..h5", "~", "$HOME")


def odd(trial: Trial, kind: str, path: Path) -> Path:
    """Something at a path that is no plain file of ours; what must not change."""
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
    """Each file argument of each command in turn is something odd, or has an odd name."""
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
    """What is at a path: the kind of thing, where it leads, what it holds."""
    try:
        here = path.lstat()
    except OSError:
        return ("nothing",)
    holds = path.read_bytes() if stat.S_ISREG(here.st_mode) else b""
    return stat.S_IFMT(here.st_mode), here.st_rdev, os.readlink(path) if path.is_symlink() else "", holds


def inside(trial: Trial) -> None:
    """Datasets that are links, or lie in other files, as operands and as the result."""
    rng, work = trial.rng, trial.work
    a, b = trial.matrix((60, 50)), trial.matrix((50, 40))
    elsewhere = ("external", "external group", "virtual", "raw")
    kind = rng.choice((*elsewhere, *elsewhere, "soft", "hard", "user block", "chunked", "big-endian"))
    with h5py.File(work / "target.h5", "w") as file:
        file["before"] = trial.matrix((rng.randint(1, 60), 50))  # so that offsets differ
        file["g/x"] = a
        file["g/kept"] = b
    with h5py.File(work / "link.h5", "w", userblock_size=1024 if kind == "user block" else 0) as file:
        file["b"] = b
        file["first"] = trial.matrix((60, 50))
        group = file.create_group("here")
        if kind == "soft":
            file["stored"], group["x"] = a, h5py.SoftLink("/stored")
        elif kind == "external":
            group["x"] = h5py.ExternalLink("target.h5", "/g/x")
        elif kind == "external group":
            file["grp"] = h5py.ExternalLink("target.h5", "/g")
        elif kind == "virtual":
            layout = h5py.VirtualLayout((60, 50), a.dtype)
            layout[...] = h5py.VirtualSource("target.h5", "g/x", (60, 50))
            group.create_virtual_dataset("x", layout)
        elif kind == "raw":
            (work / "raw.bin").write_bytes(bytes(24) + a.tobytes())
            group.create_dataset("x", (60, 50), a.dtype, external=[(str(work / "raw.bin"), 24, a.nbytes)])
        else:
            options = {"chunks": (7, 9), "compression": "gzip"} if kind == "chunked" else {}
            group.create_dataset("stored", data=a, dtype=">f8" if kind == "big-endian" else "f8", **options)
            group["x"] = group["stored"]
    where = "/grp/x" if kind == "external group" else "/here/x"
    beside = {x: (work / x).read_bytes() for x in ("target.h5", "raw.bin") if (work / x).exists()}
    size = rng.randint(1, trial.size)
    reads = rng.random() < 0.5
    target = "c.h5:/z" if reads else f"link.h5:{rng.choice((where, where.replace('x', 'new')))}"
    words: tuple[str, ...] = ("multiply", f"link.h5:{where}" if reads else "target.h5:/g/x", "link.h5:/b", "-o", target)
    words += () if reads else ("--force",)  # what is there was not written by pdgemm
    trial.commands.append(f"# {kind}")
    outcome = judge(trial.pdgemm(size, *words))
    for name, was in beside.items():
        if (work / name).read_bytes() != was:
            raise Finding("lost", f"{kind}: {name} is not what it was")
    trial.unchanged("link.h5:/b", b)
    if outcome == "right":
        trial.is_product(target, 1, a, b)
    trial.count(outcome)


STORAGE = """
import os
fsync, seen = os.fsync, set()
def lossy(descriptor):
    fsync(descriptor)
    here, name = os.fstat(descriptor), os.readlink(f"/proc/self/fd/{descriptor}")
    if here.st_ino not in seen and ("partial" in name or "-tiles" in name):
        with open(name, "rb+") as file:
            %s
    seen.add(here.st_ino)
os.fsync = lossy
"""


RENAMES = """
import os
replace = os.replace
def dropped(old, new):
    if not ("partial" in str(old) or "-tiles" in str(old)):
        replace(old, new)
os.replace = dropped
"""


def storage(trial: Trial) -> None:
    """The disk never gets the first bytes of a file, or the last ones, or its name, and says nothing of that."""
    rng, folder = trial.rng, trial.folder / "storage"
    (a, b), old = trial.operands(60, 40, 50), trial.matrix((60, 40))
    trial.store("c.h5:/z", old)
    trial.store("c.h5:/kept", a)
    head, end = f"file.write(bytes({rng.choice((1, 8, 96))}))", f"file.truncate(int({rng.random()} * here.st_size))"
    fault = rng.choice((head, end, "drop renames"))
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(STORAGE.replace("%s", fault) if "file" in fault else RENAMES)
    trial.commands.append(f"# the storage does {fault}")
    words = ["multiply", "a.h5:/x", "b.h5:/x", "-o", "c.h5:/z", "--force"]
    words += rng.choice(([], ["--memory", "9MB"], ["--checkpoint", "0s"]))
    path = os.pathsep.join((str(folder), trial.environment["PYTHONPATH"]))
    outcome = judge(trial.pdgemm(rng.randint(1, trial.size), *words, PYTHONPATH=path))
    trial.unchanged("c.h5:/kept", a)
    if outcome == "right":
        trial.is_product("c.h5:/z", 1, a, b)
    else:
        trial.unchanged("c.h5:/z", old)
    trial.count(outcome)
