"""The checks of hooks that see the inputs and the weights of single members: one member or several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.seeds import generator
from ensemblekit.members.stochastic import MemberUniform
from ensemblekit.testing.checks import check
from ensemblekit.testing.method_fixture import BATCH, MethodFixture
from ensemblekit.testing.method_hooks import HookChecks
from ensemblekit.testing.reviews import call_unmodified, describe, mismatch, works_on_meta

NUM_WEIGHTS = 7
HOOKS = ("member_inputs", "weight_penalty", "second_weights")


class MemberHookChecks(MethodFixture):
    """The checks of `member_inputs`, `weight_penalty` and `second_weights`."""

    @check("members have views and weights of their own", needs=[HookChecks.usable_hooks])
    def member_hooks(self) -> None:
        """What a hook returns for a member has the right shape, and does not depend on which others it sees."""
        for hook in self.implemented(HOOKS):
            for device in ("cpu", "meta"):
                for dtype in (torch.float32, torch.float64):
                    self._check_shape(hook, torch.device(device), dtype)
            together = self._call(hook, [2, 0], torch.device("cpu"), torch.float64)
            for row, member in enumerate((2, 0) if together is not None else ()):
                alone = self._call(hook, [member], torch.device("cpu"), torch.float64)
                if wrong := mismatch(together[row : row + 1], alone, 1e-9):
                    raise self.violation(
                        "for each member a result that depends on nothing of the others",
                        f"for two members at once {wrong}",
                        hook,
                        "reduce over the other dimensions only, and sample with `uniform`",
                    )

    def _check_shape(self, hook: str, device: torch.device, dtype: torch.dtype) -> None:
        arguments = self._member_arguments(hook, [0, 1], device, dtype)
        call: Callable[..., Any] = getattr(self.objective.hooks.call, hook)
        with works_on_meta(device, self.plugin_class, hook):
            results = call_unmodified(self.plugin_class, hook, call, arguments)
        like = arguments["inputs"] if hook == "member_inputs" else arguments["weights"]
        shape = {
            "member_inputs": (2, *like.shape),
            "weight_penalty": (2,),
            "second_weights": tuple(like.shape),
        }[hook]
        expected = describe(torch.empty(shape, dtype=dtype, device=device))
        for result in results if isinstance(results, list) else [results]:
            if result is not None and describe(result) != expected:
                raise self.violation(expected, describe(result), hook, "keep dtype and device of the arguments")

    def _call(self, hook: str, members: list[int], device: torch.device, dtype: torch.dtype) -> Any:
        torch.default_generator.manual_seed(len(members))  # nothing may depend on it
        results = getattr(self.objective.hooks.call, hook)(**self._member_arguments(hook, members, device, dtype))
        return (results or [None])[0] if isinstance(results, list) else results

    def _member_arguments(
        self, hook: str, members: list[int], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Any]:
        """Arguments for some members; those of a member are the same whatever the others are."""

        def random(purpose: str, *shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator(0, "contract", purpose), dtype=torch.float64)

        indices = torch.tensor(members, device=device)
        if hook == "member_inputs":
            uniform = MemberUniform(MemberUniform.keys_of(0, members, device), 3)
            inputs = random("inputs", BATCH, *self.info.input_shape).to(device, dtype)
            return {"inputs": inputs, "members": indices, "uniform": uniform, "training": True}
        rows = {
            name: random(name, self.members, NUM_WEIGHTS)[members].to(device, dtype)
            for name in ("weights", "gradient", "start")
        }
        if hook == "second_weights":
            return {"weights": rows["weights"], "gradient": rows["gradient"]}
        moment = {"epoch": 1, "num_epochs": 2, "progress": 0.25}
        sizes = {"num_members": self.members, "num_samples": 100, "members": indices}
        return {"weights": rows["weights"], "start": rows["start"], **sizes, **moment}
