"""Runs `ensemblekit` in this process, without the second that importing torch takes in a new one."""

from __future__ import annotations

from click.testing import CliRunner, Result

from ensemblekit.cli import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def last_error(result: Result) -> str:
    return result.stderr.strip().splitlines()[-1]
