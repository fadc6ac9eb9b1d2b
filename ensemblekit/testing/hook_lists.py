"""Lists of hooks, derived from `ensemblekit.core.hookspecs` so that a new hook needs no edit here."""

from __future__ import annotations

from ensemblekit.core import hookspecs
from ensemblekit.core.verification import HOOK_ARGUMENTS

OBSERVER_HOOKS = tuple(
    hook for hook in HOOK_ARGUMENTS if getattr(hookspecs, hook).__annotations__["return"] in (None, "None")
)
"""Hooks that return nothing: extensions may implement these."""
RESULT_HOOKS = tuple(hook for hook in HOOK_ARGUMENTS if hook not in OBSERVER_HOOKS)
"""Hooks that return a value."""
OBJECTIVE_HOOKS = tuple(
    hook
    for hook in RESULT_HOOKS
    if "outputs" in HOOK_ARGUMENTS[hook] and {"combined", "fitted"} & {*HOOK_ARGUMENTS[hook]}
)
"""Hooks of the objective, called in every step: they take the members' outputs, and the combined output or the fitted
combiner. `fit_combiner` takes neither, and sees held-out data only."""
