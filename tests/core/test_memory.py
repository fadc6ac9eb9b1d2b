"""The limits of memory that count, and freed memory that is kept for the next step where that was asked for."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import run

import ensemblekit as ek
from ensemblekit.core import memory

PROGRAM = """
import resource, torch
from ensemblekit.core.memory import keep_freed_memory
kept = keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(12_000_000)
before = faults()
for _ in range(10):
    torch.ones(12_000_000)
print(kept, faults() - before)
"""


def page_faults(**environment: str) -> tuple[str, int]:
    """Whether memory is kept, and the page faults of ten times asking for 48 MB and freeing it."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    kept, count = run.stdout.split()
    return kept, int(count)


def test_memory_that_is_freed_and_asked_for_again_is_not_fetched_from_the_system():
    kept, few = page_faults()
    left_alone, many = page_faults(ENSEMBLEKIT_KEEP_MEMORY="0")
    assert (kept, left_alone) == ("True", "False")
    assert few * 2 < many


# Memory is kept by the command line; a library must not change malloc unasked.

SPEC = {
    "data": {"name": "digits", "limit_train": 20, "limit_test": 20, "validation_fraction": 0},
    "model": {"name": "mlp", "hidden": []},
    "ensemble": {"members": 1},
    "training": {"epochs": 1},
}


def test_python_leaves_malloc_alone_and_the_command_line_does_not(tmp_path: Path, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: calls.append("kept"))
    library = [name for name in sys.modules if name.startswith(("ensemblekit.engines", "ensemblekit.inference"))]
    assert not [name for name in library if hasattr(sys.modules[name], "keep_freed_memory")]
    path = ek.train(SPEC, out=tmp_path / "run", progress=False).path
    ek.load(path)
    ek.evaluate_run(path)
    assert calls == []
    assert run("list", "losses").exit_code == 0
    assert calls == []
    assert run("evaluate", str(path), "--json").exit_code == 0
    assert calls == ["kept"]


# The limit of memory


def fake_system(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 23 0:27 / /sys rw - sysfs sysfs rw\n"
    "34 31 0:31 {top} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {top} {point} rw,relatime - cgroup cgroup rw,memory\n"
)
SYSTEMS = {
    "no groups": ("", "", {}, []),
    "version 2": ("0::/job\n", V2, {"sys/fs/cgroup/job/memory.max": "1000\n"}, [1000]),
    "version 2 without a limit": ("0::/job\n", V2, {"sys/fs/cgroup/job/memory.max": "max\n"}, []),
    "version 2, limited by a parent": (
        "0::/user/job\n",
        V2,
        {"sys/fs/cgroup/user/memory.max": "700\n", "sys/fs/cgroup/user/job/memory.max": "max\n"},
        [700],
    ),
    "version 2 in a container": ("0::/\n", V2, {"sys/fs/cgroup/memory.max": "4096\n"}, [4096]),
    "version 1 and its parents": (
        "4:memory:/a/b\n1:cpu:/c\n0::/\n",
        V1.format(top="/", point="/sys/fs/cgroup/memory"),
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "300\n",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "900\n",
            "sys/fs/cgroup/cpu/c/memory.limit_in_bytes": "1\n",
        },
        [300, 900, 9223372036854771712],
    ),
    "version 1, container without a namespace": (
        "4:memory:/docker/77/inner\n",
        V1.format(top="/docker/77", point="/mnt/my\\040groups"),
        {
            "mnt/my groups/memory.limit_in_bytes": "500\n",
            "mnt/my groups/inner/memory.limit_in_bytes": "600\n",
            "mnt/memory.limit_in_bytes": "1\n",
        },
        [500, 600],
    ),
}


@pytest.mark.parametrize(("groups", "mounts", "files", "expected"), SYSTEMS.values(), ids=SYSTEMS.keys())
def test_limits_of_control_groups_are_read(groups, mounts, files, expected, tmp_path: Path) -> None:
    assert sorted(memory.cgroup_limits(fake_system(tmp_path, groups, mounts, files))) == expected


def test_the_smallest_limit_counts_and_data_may_take_a_quarter_of_it(monkeypatch) -> None:
    physical = memory.memory_limit()
    assert 2**20 < physical <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(memory, "cgroup_limits", lambda: [4000, 8000])
    assert ek.memory_limit() == 4000
    assert ek.fits_in_memory(1000)
    assert not ek.fits_in_memory(1001)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2000, resource.RLIM_INFINITY))
    assert ek.memory_limit() == 2000
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert ek.memory_limit() == 4000
