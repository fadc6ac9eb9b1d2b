"""The command line: click and rich, a file for each group of verbs. It parses, calls and prints.

Uses everything below it, imported inside the commands, so that `ensemblekit --help` imports neither torch nor
pydantic. Start with `commands.py`, which has the top-level command and turns every error into one line.
"""

from ensemblekit.cli.commands import main

__all__ = ["main"]
