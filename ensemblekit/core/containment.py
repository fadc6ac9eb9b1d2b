"""Keeps a run from being hurt by those who only watch it: a logger or a display that raises is left out."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

from ensemblekit.core.errors import EnsemblekitError, one_line


class Containment:
    """Calls the hooks of one observer until the first failure, which is reported; then only `run_ended`, to close it.

    Args:
        name: what to call it in the report.
        report: told about the failure.
    """

    def __init__(self, name: str, report: Callable[[str], None]) -> None:
        self.name, self.report = name, report
        self.failed = False

    def contain(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the implementation of a hook that never raises; `run_started` may refuse the run."""

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if self.failed and hook != "run_ended":
                return None
            try:
                return function(*arguments)
            except (Exception, SystemExit) as error:
                if hook == "run_started" and isinstance(error, EnsemblekitError):
                    raise
                if not self.failed:
                    self.failed = True
                    self.report(f"{self.name} failed in {hook} and is left out from now on: {_description(error)}")
                return None

        return call


def _description(error: BaseException) -> str:
    text = error.line if isinstance(error, EnsemblekitError) else f"{type(error).__name__}: {one_line(str(error))}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text.removesuffix(': ')} ({frame.filename}, line {frame.lineno})"
