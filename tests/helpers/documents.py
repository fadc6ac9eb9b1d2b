"""The code in a Markdown document, followed as a reader would: save files, run Python, run commands.

A block whose first line is a comment with the name of a file is that file. Other Python runs in one namespace for the
whole document, or for the section if sections are read separately. A block of text right after a block of code shows
the output of that code; a line "…" in it stands for any number of lines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import ensemblekit as ek
from ensemblekit.cli import main
from helpers.places import ROOT

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"# (\S+\.(?:py|toml))\n")
FOR_A_SHELL = ("pip ", "cd ", "python -m build", "twine ", "ruff ", "python docs/", "python tests/")
"""Commands that reach outside the document: packages are installed and built in the tests of `ensemblekit new`, the
others are run by CI or by tests of their own."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    line: int
    """Line number of its first line of code."""
    language: str
    text: str
    shown: str | None = None
    """The output that the document shows."""

    @property
    def file_name(self) -> str | None:
        found = FILE_NAME.match(self.text)
        return found.group(1) if found and self.language in ("python", "toml") else None

    @property
    def content(self) -> str:
        """The text without the line that names the file."""
        return self.text if self.file_name is None else self.text.partition("\n")[2]

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    """Yield the blocks of a document in order, each with the output that is shown for it."""
    return _blocks(document, document.read_text(), first_line=1)


def _blocks(document: Path, text: str, first_line: int) -> Iterator[Block]:
    found = list(FENCE.finditer(text))
    for here, after in pairwise([*found, None]):
        assert here is not None
        language, code = here.groups()
        if language == "text":
            continue
        shown = after and after.group(1) == "text" and not text[here.end() : after.start()].strip()
        line = first_line + text[: here.start(2)].count("\n")
        yield Block(document, line, language, code, after.group(2) if after and shown else None)


def sections(document: Path) -> dict[str, list[Block]]:
    """Return the blocks under each heading of the second level."""
    text = document.read_text()
    starts = [(found.start(), found.group(1)) for found in re.finditer(r"^## (.*)$", text, flags=re.MULTILINE)]
    return {
        title: list(_blocks(document, text[start:end], 1 + text[:start].count("\n")))
        for (start, title), (end, _) in pairwise([*starts, (len(text), "")])
    }


def words(output: str, numbers: bool) -> list[str]:
    """Return the lines of an output without their spacing, and without numbers if those depend on the machine."""
    lines = output.strip().splitlines()
    plain = lines if numbers else [re.sub(r"[-+]?[\d.,]+(e-\d+)?", "#", line) for line in lines]
    return [" ".join(line.split()) for line in plain]


def shows(shown: Iterable[str], lines: Iterable[str]) -> bool:
    """Whether the shown lines are the given ones, where "…" stands for any number of lines."""
    pattern = "".join(r"(?:.*\n)*?" if line == "…" else re.escape(line) + r"\n" for line in shown)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


class Reader:
    """Somebody who goes through a document, in an empty current directory with the repository's specs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "specs").symlink_to(ROOT / "specs")
        self.namespace: dict[str, Any] = {"__name__": "__main__"}

    def follow(self, block: Block) -> None:
        """Do what a block says, and compare its output with the one that is shown."""
        output = ""
        if block.file_name is not None:
            path = self.directory / block.file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.content)
        elif block.language == "python":
            output = self._run_python(block)
        elif block.language == "toml":
            self._check_toml(block)
        elif block.language == "console":
            for line in block.text.splitlines():
                output = self._run_command(line)
        else:
            raise AssertionError(f"{block}: nobody runs a block of {block.language}")
        if block.shown is not None:
            exactly = block.language == "python"
            same = shows(words(block.shown, exactly), words(output, exactly))
            assert same, f"{block} prints something else:\n{output}"

    def _run_python(self, block: Block) -> str:
        printed = StringIO()
        # so that a traceback names the document's own line
        code = compile("\n" * (block.line - 1) + block.text, str(block.document), "exec")
        with redirect_stdout(printed):
            exec(code, self.namespace)
        return printed.getvalue()

    def _check_toml(self, block: Block) -> None:
        """Check that a part of a pyproject.toml is TOML, and that a part of a spec is valid with the rest left out."""
        tables = tomllib.loads(block.text)
        if "project" not in tables:
            ek.load_spec({"data": "cifar100", "model": "mlp"} | tables)  # nothing is loaded

    def _run_command(self, line: str) -> str:
        if line.startswith("ensemblekit "):
            result = CliRunner().invoke(main, shlex.split(line)[1:])
            assert result.exit_code == 0, f"{line}\n{result.output}"
            return result.stdout
        if line.startswith("pytest "):
            # stands for the installation that the document asks for
            sources = os.pathsep.join(str(source) for source in self.directory.glob("*/src"))
            command = [sys.executable, "-m", "pytest", "-q", "-W", "error", *shlex.split(line)[1:]]
            environment = {**os.environ, "PYTHONPATH": sources}
            result = subprocess.run(command, cwd=self.directory, env=environment, capture_output=True, text=True)
            assert result.returncode == 0, result.stdout
            return result.stdout
        assert line.startswith(FOR_A_SHELL), f"nobody runs {line!r}"
        return ""
