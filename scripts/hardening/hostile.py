#!/usr/bin/env python
"""Attack the package at random for a stated time: no file may be lost, no job hang, no result be silently wrong.

    python scripts/hardening/hostile.py --minutes 10                      # all attacks in turns, on up to 4 ranks
    python scripts/hardening/hostile.py --minutes 2 --only kills,damage --seed 7
    python scripts/hardening/hostile.py --kind restart --ranks 9              # jobs are killed, and started again
    python scripts/hardening/hostile.py --kind survivors --ranks 9            # ranks are killed, and the others go on
    python scripts/hardening/hostile.py --kind stopped                     # ranks are stopped, and some are continued
    python scripts/hardening/hostile.py --trial damage.json:1234:5        # one trial again, or one case of it
    python scripts/hardening/hostile.py --list

The attacks are listed in attacks/table.py.  A trial is identified by the name of its attack and a seed; both are
printed.  Each trial has a separate folder, /dev/shm and processes, in namespaces of this command (unshare), which
vanish with the command, also after kill -9.  The folders of trials with findings are kept, and their paths printed.

Exit codes: 0 no findings, 1 findings, 2 bad arguments, 3 this machine allows no such namespaces.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from attacks.table import ATTACKS, TEXTS  # noqa: E402
from attacks.trial import KINDS, Finding, Told, Trial, end_all  # noqa: E402

INSIDE = "_PDGEMM_HOSTILE"  # this environment variable is set inside the namespaces
OUTCOMES = ("right", "refused", "ended")

# {detector: code that --plant adds to each product, a fault that the detector must find}
PLANTS = {
    "hang": "while True: pass",
    "wrong": "made = product(*args, **options); made.local[...] += 1",
    "lost": "made = product(*args, **options); h5py.File('f.h5', 'a').clear()",
    "signal": "os.kill(os.getpid(), 7)",
    "traceback": "raise AssertionError('planted')",
    "code": "os._exit(1)",
    "blind": "options['protect'] = None; made = product(*args, **options)",
    "litter": "made = product(*args, **options); open('/dev/shm/litter', 'w').close()",
}
PLANT = """
import os
if {"OMPI_COMM_WORLD_RANK", "PMI_RANK"} & {*os.environ}:
    import h5py, pdgemm.gemm
    product = pdgemm.gemm.pdgemm
    def planted(*args, **options):
        %s
        return made
    pdgemm.gemm.pdgemm = planted
"""


def main() -> int:
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    asked = arguments()
    if asked.list:
        print("\n".join(f"{name:18} {' '.join(TEXTS[name].split())}" for name in ATTACKS))
        return 0
    if INSIDE not in os.environ:
        return enter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        return campaign(asked, folder)
    finally:
        end_all()
        shutil.rmtree(folder / "originals", ignore_errors=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--only", "--kind", default="", help="attacks by the beginnings of names: kills,damage.json")
    parser.add_argument("--ranks", type=int, default=4, help="the most ranks of a job")
    parser.add_argument("--bound", type=float, default=60, help="seconds after which a command counts as hanging")
    parser.add_argument("--trial", help="ATTACK:SEED or ATTACK:SEED:CASE: run only this trial or case")
    parser.add_argument("--plant", choices=PLANTS, help="plant this fault in the package; it has to be found")
    parser.add_argument("--list", action="store_true", help="list the attacks")
    asked = parser.parse_args()
    wanted = tuple(filter(None, (asked.trial or asked.only).split(":")[0].split(",")))
    asked.one = re.fullmatch(r"([a-z_.0-9]+):(\d+)(?::(\d+))?", asked.trial) if asked.trial else None
    if asked.trial and not (asked.one and asked.one[1] in ATTACKS):
        parser.error(f"--trial {asked.trial} is not ATTACK:SEED or ATTACK:SEED:CASE; --list lists the attacks")
    asked.attacks = [name for name in ATTACKS if not wanted or name.startswith(wanted)]
    if not asked.attacks:
        parser.error(f"no attack's name begins with {', '.join(wanted)}; the attacks are {', '.join(ATTACKS)}")
    return asked


def enter() -> int:
    """Run this command again as the first process of new namespaces."""
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    for command in (unshare, [*unshare, "--user", "--map-root-user"]):
        try:
            words = [*command, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
            tried = subprocess.run(words, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            print("hostile.py: unshare is missing; it is in util-linux", file=sys.stderr)
            return 3
        if tried.returncode == 0:
            os.environ[INSIDE] = "1"
            sys.stdout.flush()
            os.execvp(command[0], [*command, sys.executable, *sys.argv])
    print(f"hostile.py: this machine allows no new namespaces: {tried.stderr.strip()}", file=sys.stderr)
    return 3


def campaign(asked: argparse.Namespace, folder: Path) -> int:
    draw, end = random.Random(asked.seed), time.monotonic() + 60 * asked.minutes
    print(f"seed {asked.seed}, up to {asked.ranks} ranks, {asked.minutes:g} minutes; findings are kept in {folder}")
    trials, outcomes, found = Counter[str](), {name: Counter[str]() for name in ATTACKS}, list[str]()
    number, turn = 0, list[str]()
    while not number or (time.monotonic() < end and not asked.trial):
        turn = turn or draw.sample(asked.attacks, len(asked.attacks))
        name, seed, only = turn.pop(), draw.getrandbits(32), None
        if asked.one:
            name, seed, only = asked.one[1], int(asked.one[2]), int(asked.one[3]) if asked.one[3] else None
        number += 1
        plant = PLANT % PLANTS[asked.plant] if asked.plant else ""
        trial = Trial(name, seed, folder / str(number), asked.ranks, asked.bound, plant, only)
        start = time.monotonic()
        try:
            ATTACKS[name](trial)
        except Finding as bad:
            trial.found(bad.kind, str(bad))
        except Told:
            trial.found("hang", "the watchdog ended a job whose ranks made the same calls")
        except KeyboardInterrupt:
            end = 0
        except Exception as bad:  # a faulty attack must not lose the findings of others
            trial.found("code", f"the attack itself failed: {type(bad).__name__}: {bad}")
        finally:
            trial.close()
        trials[name] += 1
        outcomes[name] += trial.outcomes + Counter(x for x, *_ in trial.findings)
        said = ", ".join(f"{n} {x}" for x, n in trial.outcomes.items())
        print(f"{name}:{seed}  {time.monotonic() - start:.1f} s  {said}")
        for kind, repeat, text in trial.findings:
            found.append(
                f"{kind.upper()}  --trial {repeat} --ranks {asked.ranks}\n    {text[:900]}\n    {trial.folder}"
            )
            print(found[-1])
        if trial.findings:
            (trial.folder / "commands").write_text("\n".join(trial.commands), errors="backslashreplace")
    print(f"\n{'attack':18} trials" + "".join(f"{x:>10}" for x in (*OUTCOMES, *KINDS)))
    for name in asked.attacks:
        print(f"{name:18} {trials[name]:6}" + "".join(f"{outcomes[name][x]:10}" for x in (*OUTCOMES, *KINDS)))
    print(f"\n{len(found)} findings{':' if found else ''}")
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
