"""The contract kit: what every plugin must keep to, as checks that read like a review when they fail.

In a test file of your own::

    @pytest.mark.parametrize("check", contract(SoftMin(temperature=0.5)), ids=str)
    def test_contract(check):
        check()

Names are imported when they are first used, because pytest loads the plugin in here whenever it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemblekit.testing.checks import Check, CheckResult, ContractError
    from ensemblekit.testing.contracts import contract, run_contract

__all__ = ["Check", "CheckResult", "ContractError", "contract", "run_contract"]

_HOME_OF = {
    "Check": "checks",
    "CheckResult": "checks",
    "ContractError": "checks",
    "contract": "contracts",
    "run_contract": "contracts",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME_OF:
        raise AttributeError(f"module 'ensemblekit.testing' has no attribute {name!r}")
    return getattr(import_module(f"ensemblekit.testing.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
