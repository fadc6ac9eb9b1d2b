"""The contract kit: checks that every plugin must pass, whose failures read like a code review.

In your test file::

    @pytest.mark.parametrize("check", contract(SoftMin(temperature=0.5)), ids=str)
    def test_contract(check):
        check()

Uses `api` and everything below it. Start with `contracts.py` (the entry points), then `checks.py` (what a check is) and
`method.py`. Names are imported on first use, because pytest loads the plugin in this package whenever it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemblekit.testing.checks import Check, CheckResult
    from ensemblekit.testing.contracts import contract, run_contract
    from ensemblekit.testing.reviews import ContractError

__all__ = ["Check", "CheckResult", "ContractError", "contract", "run_contract"]

_MODULES = {
    "Check": "checks",
    "CheckResult": "checks",
    "ContractError": "reviews",
    "contract": "contracts",
    "run_contract": "contracts",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module 'ensemblekit.testing' has no attribute {name!r}")
    return getattr(import_module(f"ensemblekit.testing.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
