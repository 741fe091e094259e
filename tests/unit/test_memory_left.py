"""The free memory that the system reports, here in files that these tests write."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pdgemm.support import memory_left as module
from pdgemm.support.memory_left import memory_left

MACHINE = "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\nSwapFree: 100 kB\nHugePages_Total: 0\n"
KIB = 1024


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    written(tmp_path, {"proc/meminfo": MACHINE})
    return tmp_path


def written(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_machine(root: Path) -> None:
    assert memory_left() == {"memory": 4100 * KIB}
    (root / "proc/meminfo").unlink()
    assert memory_left() == {}  # the system reports nothing


def test_a_job_of_slurm_and_its_step(root: Path) -> None:
    """Control groups, version 2: the limits of all groups of the process; pages of files count as free."""
    groups = root / "sys/fs/cgroup"
    job = "sys/fs/cgroup/slurm/job_7"
    written(
        root,
        {
            "proc/self/cgroup": "0::/slurm/job_7/step_0/task_3\n",
            "sys/fs/cgroup/slurm/memory.max": "max\n",
            f"{job}/memory.max": f"{3000 * KIB}\n",
            f"{job}/memory.current": f"{2500 * KIB}\n",
            f"{job}/memory.stat": f"anon 5\nactive_file {200 * KIB}\ninactive_file {250 * KIB}\n"
            f"slab_reclaimable {50 * KIB}\nshmem 77777\n",
            f"{job}/step_0/memory.max": f"{1000 * KIB}\n",
            f"{job}/step_0/memory.current": f"{1400 * KIB}\n",  # may exceed the limit for a moment
        },
    )
    assert memory_left() == {
        "memory": 4100 * KIB,
        f"control group {groups}/slurm/job_7": (3000 - 2500 + 500 + 100) * KIB,
        f"control group {groups}/slurm/job_7/step_0": 100 * KIB,
    }


def test_a_container_of_version_1(root: Path) -> None:
    group = root / "sys/fs/cgroup/memory"
    written(
        root,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",  # no limit
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{800 * KIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{600 * KIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 9\ntotal_inactive_file {50 * KIB}\n",
        },
    )
    assert memory_left() == {"memory": 4100 * KIB, f"control group {group}/docker/abc": (200 + 50 + 100) * KIB}


_STEPS = """
from resource import RUSAGE_SELF, getrusage
import numpy as np
from pdgemm.support.memory_left import keep_freed_memory

kept = keep_freed_memory()
for _ in range(3):
    before = getrusage(RUSAGE_SELF).ru_minflt
    some = [np.ones(1 << 18, np.float32) for _ in range(64)]
    del some
print(kept, getrusage(RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds of glibc")
@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ({"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=1048576"}, True),
        ({"MALLOC_TRIM_THRESHOLD_": "1048576"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}, False),
    ],
)
def test_a_step_takes_the_memory_of_the_one_before(own: dict[str, str], kept: bool) -> None:
    """64 arrays, one after another, cause fewer than 64 page faults, unless the user has set malloc's limits."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))} | own
    run = subprocess.run([sys.executable, "-c", _STEPS], env=environment, capture_output=True, text=True, check=True)
    answer, pages = run.stdout.split()
    assert answer == str(kept)
    assert (int(pages) < 64) == kept
