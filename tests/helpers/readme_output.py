"""Puts what the quick start really prints into the README: python tests/readme_output.py"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.places import ROOT

BLOCK = re.compile(r"(```text\n)(.*?)(\n```)", flags=re.DOTALL)


def quick_start_output() -> str:
    """The output of the quick start's command on a pipe, less the epochs between the first two and the last."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ensemblekit", "train", str(ROOT / "specs" / "digits.toml")]
        output = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    lines = output.rstrip().splitlines()
    epochs = [place for place, line in enumerate(lines) if line.startswith("epoch ")]
    return "\n".join([*lines[: epochs[2]], "…", *lines[epochs[-1] :]])


def readme_block() -> str:
    """What the README shows of it."""
    found = BLOCK.search((ROOT / "README.md").read_text())
    assert found is not None
    return found.group(2)


def write_readme(path: Path, output: str) -> None:
    """Replace the block."""
    path.write_text(BLOCK.sub(lambda found: found.group(1) + output + found.group(3), path.read_text(), count=1))


if __name__ == "__main__":
    write_readme(ROOT / "README.md", quick_start_output())
