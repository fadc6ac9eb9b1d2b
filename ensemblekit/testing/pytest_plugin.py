"""`pytest --ensemblekit NAME`: the contract of an installed plugin as tests, one for each check.

Loaded whenever pytest starts, so slow imports wait until the option is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ensemblekit.testing.checks import Check


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ensemblekit").addoption(
        "--ensemblekit",
        action="append",
        default=[],
        metavar="NAME",
        help="run the contract of a plugin: NAME, KIND:NAME, PACKAGE or FILE.py; repeatable",
    )


@pytest.hookimpl(tryfirst=True)  # so that -k and -m select among these items too
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    names = config.getoption("--ensemblekit")
    if names:
        root = _Group.from_parent(session, name="ensemblekit", nodeid="ensemblekit")
        items.extend(item for name in names for item in _items(root, name))


class _Group(pytest.Collector):
    """A node that only groups items under a name."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return []


def _items(root: pytest.Collector, text: str) -> Iterator[pytest.Item]:
    from ensemblekit.core.errors import EnsemblekitError
    from ensemblekit.testing.contracts import contract
    from ensemblekit.testing.targets import find_targets, make

    try:
        registry, plugins = find_targets(text)
        for info in plugins:
            group = _Group.from_parent(root, name=info.name)
            for check in contract(make(info, registry, {})):
                yield CheckItem.from_parent(group, name=check.name, check=check)
    except EnsemblekitError as error:
        raise pytest.UsageError(f"--ensemblekit {text}: {error}") from error


class CheckItem(pytest.Item):
    """One check as a test."""

    def __init__(self, *, check: Check, **options: Any) -> None:
        super().__init__(**options)
        self.check = check

    def runtest(self) -> None:
        self.check()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The review alone, without a traceback through the kit."""
        from ensemblekit.testing.reviews import ContractError

        return str(excinfo.value) if isinstance(excinfo.value, ContractError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.config.rootpath / "ensemblekit", None, self.name
