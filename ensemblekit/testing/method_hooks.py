"""The contract of the hooks that few methods need: of those that have none of them, nothing is asked here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ensemblekit.core.hooks import implemented_hooks
from ensemblekit.core.seeds import generator
from ensemblekit.testing.checks import ContractError, asked_gently, difference, form, look_at, on_meta_too
from ensemblekit.testing.method_fixture import BATCH, MethodBench


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
            arguments = {"outputs": outputs, "target": target}
            found.append(asked_gently(bench.method_class, "fit_combiner", bench.objective.fit_combiner, arguments))
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


def second_inputs(bench: MethodBench) -> None:
    """Of the inputs' own form, in both precisions and on `meta`; and the same for an element wherever it stands."""
    if "second_inputs" not in implemented_hooks(bench.method_class):
        return
    where = look_at(bench.method_class, "second_inputs")
    random = generator(0, "contract", "second_inputs")
    inputs, gradient = torch.randn(2, BATCH, 3, 2, 2, generator=random, dtype=torch.float64)
    for device in ("cpu", "meta"):
        for dtype in (torch.float32, torch.float64):
            given = inputs.to(device, dtype, copy=True)
            arguments = {"inputs": given, "gradient": gradient.to(device, dtype, copy=True)}
            with on_meta_too(device, bench.method_class, "second_inputs"):
                answer = asked_gently(
                    bench.method_class, "second_inputs", bench.objective.hooks.hook.second_inputs, arguments
                )
            if form(answer) != form(given):
                fix = "answer element by element, with the inputs' own shape, dtype and device"
                raise ContractError(f"{form(given)}, as the inputs are", form(answer), where, fix)
    whole = bench.objective.second_inputs(inputs, gradient)
    order = torch.randperm(inputs.numel(), generator=random)
    shuffled = [values.flatten()[order].view_as(values) for values in (inputs, gradient)]
    torch.default_generator.manual_seed(1)
    # as K members at once are given: another one before this one
    stacked = bench.objective.second_inputs(*(torch.stack([-values, values]) for values in shuffled))[1]
    if wrong := difference(stacked, whole.flatten()[order].view_as(whole), 1e-9):
        raise ContractError(
            "what an element becomes to depend on it and its gradient alone",
            f"with the elements in another order, and two members at once, {wrong}",
            where,
            "combine single elements only: no norm, no mean, no position, nothing random",
        )


RARE_HOOK_CHECKS: dict[str, Callable[[MethodBench], None]] = {
    "a combiner is fitted alike each time": fitted_combiner,
    "second inputs are made element by element": second_inputs,
}
