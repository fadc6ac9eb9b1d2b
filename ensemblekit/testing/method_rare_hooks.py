"""The contract of the hooks that few methods need: of those that have none of them, nothing is asked here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ensemblekit.hooks import implemented_hooks
from ensemblekit.testing.checks import ContractError, form, look_at
from ensemblekit.testing.method_bench import MethodBench


def fitted_combiner(bench: MethodBench) -> None:
    """The same held-out outputs give the same fit, bit for bit, and `combine` takes it in both precisions."""
    if "fit_combiner" not in implemented_hooks(bench.method_class):
        return
    where = look_at(bench.method_class, "fit_combiner")
    for dtype in (torch.float32, torch.float64):
        outputs, target = bench.outputs().to(dtype), bench.target()
        target = target.to(dtype) if target.is_floating_point() else target
        found = []
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            found.append(bench.objective.fit_combiner(outputs, target))
        first, second = found
        if first is None or second is None:
            return
        if not torch.equal(first, second):
            fix = "start the search from a fixed point and draw nothing"
            raise ContractError("the same fit whenever the same outputs are given", form(second), where, fix)
        combined = bench.objective.combine(outputs, first)
        if not bool(combined.isfinite().all()):
            where = look_at(bench.method_class, "combine")
            raise ContractError("finite outputs of the combiner that was fitted", "nan or infinity", where)


RARE_HOOK_CHECKS: dict[str, Callable[[MethodBench], None]] = {
    "a combiner is fitted alike each time": fitted_combiner,
}
