"""Writes the output of the quick start into the README: PYTHONPATH=tests python tests/helpers/readme_output.py"""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path

from click.testing import CliRunner

from ensemblekit.cli import main
from helpers.places import ROOT

BLOCK = re.compile(r"(```text\n)(.*?)(```)", flags=re.DOTALL)


def quick_start_output() -> str:
    """Return what the command of the quick start prints on a pipe."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        result = CliRunner().invoke(main, ["train", str(ROOT / "specs" / "digits.toml")])
    assert result.exit_code == 0, result.output
    return result.stdout.rstrip()


def excerpt(output: str) -> str:
    """Return the first and the last epoch and the summary, with "…" for the lines between them."""
    lines = output.splitlines()
    epochs = [index for index, line in enumerate(lines) if line.startswith("epoch ")]
    header = next(index for index in range(epochs[-1] + 1, len(lines)) if lines[index].strip())
    mean = next(index for index, line in enumerate(lines) if line.startswith("mean member"))
    next_commands = next(index for index, line in enumerate(lines) if line.startswith("next"))
    closing = [line for line in lines[mean:next_commands] if line.strip()]
    return "\n".join(["…", lines[epochs[0]], "…", lines[epochs[-1]], "", lines[header], "…", *closing, "…"])


def readme_block() -> str:
    """Return the excerpt in the README."""
    found = BLOCK.search((ROOT / "README.md").read_text())
    assert found is not None
    return found.group(2)


def write_readme(path: Path, shown: str) -> None:
    """Replace the excerpt."""
    path.write_text(BLOCK.sub(lambda found: f"{found.group(1)}{shown}\n{found.group(3)}", path.read_text(), count=1))


if __name__ == "__main__":
    write_readme(ROOT / "README.md", excerpt(quick_start_output()))
