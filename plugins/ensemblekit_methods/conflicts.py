"""Which methods cannot be used together with another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ensemblekit import Problem

if TYPE_CHECKING:
    from ensemblekit import Method, Spec


def conflicts(method: Method, spec: Spec, reasons: Mapping[str, str]) -> Iterable[Problem]:
    """Yield the methods of a spec that implement hooks which another one does not allow beside it.

    Args:
        method: That one.
        spec: With all methods.
        reasons: By the name of the hook, what a method with that hook does.
    """
    for other in spec.methods:
        reason = next((text for hook, text in reasons.items() if callable(getattr(other, hook, None))), None)
        if other.name != method.name and reason is not None:
            what = f'cannot be combined with "{other.name}", which {reason}'
            yield Problem("", what, f'remove "{other.name}" or "{method.name}"')
