"""The checks of a method's hooks, one by one: what they return, and that nothing else happens."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from ensemblekit.core.plugin import Method
from ensemblekit.core.seeds import generator
from ensemblekit.testing.checks import check, requirement
from ensemblekit.testing.hook_lists import RESULT_HOOKS
from ensemblekit.testing.method_fixture import BATCH, MethodFixture
from ensemblekit.testing.reviews import call_unmodified, describe, mismatch, works_on_meta

NUM_SAMPLES = 50
SHAPE_FIXES = {
    "combine": "reduce over the first dimension of outputs only, the members",
    "member_loss": "return a loss for each member and sample: no sum() or mean() over members or the batch",
    "ensemble_loss": "return a loss for each sample: no sum() or mean() over the batch, and no dimension of members",
    "select_members": "return one entry for each member and sample, or 1 where it is the same for all of them",
}


class HookChecks(MethodFixture):
    """The checks of single hooks."""

    @check("hooks return the right shape, dtype and device")
    def hook_results(self, devices: Iterable[str] = ("cpu", "meta")) -> None:
        """Each hook of the objective, in both precisions, on the CPU and on `meta`, where no value can be read."""
        for device in devices:
            for dtype in (torch.float32, torch.float64):
                outputs, target = self.outputs().to(device, dtype), self.target(dtype).to(device)
                for hook in self.implemented():
                    self._check_result(hook, outputs, target)

    @requirement(of=hook_results)
    def usable_hooks(self) -> None:
        """Results on the CPU are enough for the other checks."""
        self.hook_results(devices=("cpu",))

    def _check_result(self, hook: str, outputs: Tensor, target: Tensor) -> None:
        with works_on_meta(outputs.device, self.plugin_class, hook):
            arguments = self.arguments(hook, outputs.clone(), target.clone())
            result = call_unmodified(self.plugin_class, hook, partial(self.call, hook), arguments)
        if result is None:
            return
        if hook == "select_members":
            self._check_mask(result, arguments["outputs"])
            return
        outputs = arguments["outputs"]
        members, batch, num_outputs = outputs.shape
        # a hook that this table does not know may return any shape
        shapes = {"combine": (batch, num_outputs), "member_loss": (members, batch), "ensemble_loss": (batch,)}
        shape = shapes.get(hook, tuple(getattr(result, "shape", ())))
        expected = describe(outputs.new_empty(shape))
        if describe(result) != expected:
            fix = _result_fix(hook, result, shape, outputs)
            raise self.violation(f"{expected} for outputs of {describe(outputs)}", describe(result), hook, fix)

    def _check_mask(self, mask: object, outputs: Tensor) -> None:
        members, batch = outputs.shape[:2]
        sizes = tuple(mask.shape) if isinstance(mask, Tensor) else (0,)
        pairs = zip(reversed(sizes), (batch, members), strict=False)
        broadcasts = len(sizes) <= 2 and all(size in (1, full) for size, full in pairs)
        known_dtypes = (torch.bool, outputs.dtype)
        if broadcasts and isinstance(mask, Tensor) and mask.device == outputs.device and mask.dtype in known_dtypes:
            return
        raise self.violation(
            f"a mask that broadcasts to {(members, batch)}, bool or of the dtype of the outputs, on {outputs.device}",
            describe(mask),
            "select_members",
            _result_fix("select_members", mask, sizes if broadcasts else None, outputs),
        )

    @check("hooks are deterministic and keep no state", needs=[usable_hooks])
    def pure_hooks(self) -> None:
        """The same outputs give bit-identical results in every call, for every state of torch's generator."""
        outputs, target = self.outputs(), self.target()
        for hook in self.implemented():
            results = []
            for seed in (0, 1):
                torch.default_generator.manual_seed(seed)
                results.append(self.result(hook, outputs, target))
            first, second = results
            if (first is None) != (second is None) or (first is not None and not torch.equal(first, second)):
                got = "a value in one call and None in the other"
                if first is not None and second is not None:
                    got = f"in the second call {mismatch(second.double(), first.double(), 0.0)}"
                raise self.violation(
                    "the same result whenever the outputs are the same",
                    got,
                    hook,
                    "keep nothing between calls and sample nothing: randomness belongs in sample_weights, "
                    "changes over time in epoch_started",
                )

    @check("sample weights are valid and drawn per member", needs=[usable_hooks])
    def sample_weights(self) -> None:
        """Weights are finite and not negative; they depend on the seed and on no other member."""
        if not self.implemented(["sample_weights"]):
            return
        weights = []
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            weights.append(self._sampled_weights(self.members))
        first, second = weights
        if first is None or second is None:
            return
        if not torch.equal(first, second):
            got, fix = "other weights in the second call", "sample from the argument generator only"
            raise self.violation("the same weights for the same seed", got, "sample_weights", fix)
        if bool((first < 0).any()):
            fix = "clip at 0: a negative weight rewards mistakes"
            raise self.violation("weights of at least 0", f"{float(first.min()):.4g}", "sample_weights", fix)
        if not bool((first.sum(dim=0) > 0).all()):
            raise self.violation("positive weights for every member", "a member with weights of 0", "sample_weights")
        fewer = next((size for size in range(self.members - 1, 0, -1) if self.accepts_members(size)), 0)
        alone = self._sampled_weights(fewer) if fewer else None
        if alone is not None and not torch.equal(first[:, :fewer], alone):
            raise self.violation(
                "weights of a member that do not depend on the number of members",
                f"other weights for M = {fewer} than for M = {self.members}",
                "sample_weights",
                "sample member by member: torch.stack([sample(num_samples) for _ in range(num_members)], dim=1)",
            )

    def _sampled_weights(self, num_members: int) -> Tensor | None:
        targets = self.targets(NUM_SAMPLES)
        return self.objective.hooks.sample_weights(NUM_SAMPLES, num_members, seed=0, targets=targets)

    @check("life-cycle hooks return values in range", needs=[usable_hooks])
    def life_cycle(self) -> None:
        """`members_at_start` and `passes` return a count, `learning_rate` a finite number of at least 0."""
        if self.implemented(["members_at_start"]):
            start = self.call("members_at_start", num_members=self.members)
            if start is not None and not (_is_count(start) and start <= self.members):
                raise self.violation(f"an integer from 1 to {self.members}, or None", repr(start), "members_at_start")
        if self.implemented(["passes"]):
            passes = self.call("passes", num_members=self.members)
            if passes is not None and not _is_count(passes):
                raise self.violation("an integer of at least 1, or None", repr(passes), "passes")
        for epoch in self.epochs() if self.implemented(["learning_rate"]) else ():
            rate = self.call("learning_rate", base=0.1, epoch=epoch, num_epochs=self.spec.training.epochs)
            if rate is not None and not (isinstance(rate, int | float) and 0 <= rate < float("inf")):
                raise self.violation(f"a finite number of at least 0 at epoch {epoch}", repr(rate), "learning_rate")

    @check("fitting the combiner is deterministic", needs=[usable_hooks])
    def fitted_combiner(self) -> None:
        """The same held-out outputs give a bit-identical fit, and `combine` takes it in both precisions."""
        if not self.implemented(["fit_combiner"]):
            return
        for dtype in (torch.float32, torch.float64):
            outputs, target = self.outputs().to(dtype), self.target(dtype)
            arguments = {"outputs": outputs, "target": target}
            fits = []
            for seed in (0, 1):
                torch.default_generator.manual_seed(seed)
                fits.append(call_unmodified(self.plugin_class, "fit_combiner", self.objective.fit_combiner, arguments))
            first, second = fits
            if first is None or second is None:
                return
            if wrong := mismatch(second, first, 0.0):
                fix = "start the search from a fixed point, and sample nothing"
                raise self.violation("the same fit whenever the outputs are the same", wrong, "fit_combiner", fix)
            if not bool(self.objective.predict(outputs, first).isfinite().all()):
                raise self.violation("finite outputs of the fitted combiner", "nan or infinity", "combine")

    @check("second inputs are computed elementwise", needs=[usable_hooks])
    def second_inputs(self) -> None:
        """They have the shape of the inputs, and an element does not depend on the others."""
        if not self.implemented(["second_inputs"]):
            return
        random = generator(0, "contract", "second_inputs")
        inputs, gradient = torch.randn(2, BATCH, 3, 2, 2, generator=random, dtype=torch.float64)
        for device in ("cpu", "meta"):
            for dtype in (torch.float32, torch.float64):
                self._check_second_inputs(inputs.to(device, dtype, copy=True), gradient.to(device, dtype, copy=True))
        whole = self.objective.members.second_inputs(inputs, gradient)
        order = torch.randperm(inputs.numel(), generator=random)
        shuffled = [values.flatten()[order].view_as(values) for values in (inputs, gradient)]
        torch.default_generator.manual_seed(1)
        # engines may pass several members at once, with a leading dimension: here another one comes first
        stacked = self.objective.members.second_inputs(*(torch.stack([-values, values]) for values in shuffled))[1]
        if wrong := mismatch(stacked, whole.flatten()[order].view_as(whole), 1e-9):
            raise self.violation(
                "elements that depend only on the same element of the inputs and the gradient",
                f"with the elements in another order, and two members at once, {wrong}",
                "second_inputs",
                "use elementwise operations only: no norm, no mean, no position, nothing random",
            )

    def _check_second_inputs(self, inputs: Tensor, gradient: Tensor) -> None:
        arguments = {"inputs": inputs, "gradient": gradient}
        hook = self.objective.hooks.call.second_inputs
        with works_on_meta(inputs.device, self.plugin_class, "second_inputs"):
            result = call_unmodified(self.plugin_class, "second_inputs", hook, arguments)
        if describe(result) != describe(inputs):
            fix = "keep the shape, dtype and device of the inputs"
            raise self.violation(f"{describe(inputs)}, like the inputs", describe(result), "second_inputs", fix)

    @check(
        "every implemented hook returns a value",
        needs=[usable_hooks, sample_weights, life_cycle, fitted_combiner, second_inputs],
    )
    def returned_values(self) -> None:
        """A hook that always returns None has no effect, and neither has a method without hooks."""
        if not self.hooks and (unused := _own_names(self.plugin_class)):
            raise self.violation(
                "at least one hook",
                f"none, so that {unused[0]} is never used",
                fix="implement hooks of ensemblekit.core.hookspecs with @hookimpl, for example member_loss",
            )
        for hook in self.implemented(RESULT_HOOKS):
            results = list(self.results(hook))
            if results and all(result is None for result in results) and not self.returns_none_on_purpose(hook):
                raise self.violation(
                    "a value; None leaves the decision to other methods",
                    "None in every call",
                    hook,
                    "end the hook with return …; if None is intended, write return None",
                )


def _result_fix(hook: str, result: object, shape: tuple[int, ...] | None, outputs: Tensor) -> str:
    """How to fix a result, by what is wrong with it first; `shape` None: its shape is wrong in any case."""
    if not isinstance(result, Tensor):
        return "return a tensor"
    if tuple(result.shape) != shape:
        return SHAPE_FIXES[hook]
    if result.device != outputs.device:
        return "create tensors on outputs.device, as outputs.new_zeros(…) does"
    if hook == "select_members":
        return "compare for a bool mask, as in losses <= limit; or end with .to(outputs.dtype)"
    return "keep the dtype of the outputs: no .float() or .double(), and new tensors with outputs.new_zeros(…)"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _own_names(method_class: type[Method]) -> list[str]:
    """The parameters and functions that a class adds to `Method`."""
    functions = [name for name in dir(method_class) if inspect.isfunction(inspect.getattr_static(method_class, name))]
    return [*method_class.model_fields, *(name for name in functions if not hasattr(Method, name))]
