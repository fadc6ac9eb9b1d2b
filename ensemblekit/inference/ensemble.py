"""A trained ensemble: a module of members and how to combine them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import UsageError
from ensemblekit.core.losses import Loss
from ensemblekit.core.outputs import pad
from ensemblekit.core.plugin import Family, Method
from ensemblekit.core.tasks import TASKS
from ensemblekit.core.threads import ThreadPool
from ensemblekit.data.scaling import TargetScaling
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.inference.anytime import Anytime
from ensemblekit.inference.calibration import Calibration
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.conformal import Conformal, uniform_by_input
from ensemblekit.inference.coverage import values_and_spreads
from ensemblekit.inference.inputs import as_inputs, prepared_frame
from ensemblekit.inference.member_copies import MemberCopies, Watch
from ensemblekit.inference.outputs import check_finite
from ensemblekit.members.layout import run_objective
from ensemblekit.members.stochastic import MemberUniform, outputs_of_passes
from ensemblekit.spec.sections import NetworkPlan, Spec

_REBUILT = ("_objective", "_pool", "_watch", "_copies", "_last_combiner", "_anytime")
"""Attributes that belong to a process; a copy gets its own."""


class Ensemble(nn.Module):
    """Members and how to combine them.

    Inputs are batches (B, *input_shape) as the data set gives them: tensors, arrays, frames or lists of numbers, which
    are converted to the members' dtype and device. Images of type uint8 are scaled, cropped and normalised as in
    training; floating-point inputs are used as they are. For a run on a table, a frame has its columns by name, and is
    prepared as the training rows were.

    In evaluation mode outputs have no gradients, unless the inputs require gradients or `enable_grad` is true. On a CPU
    such predictions use copies of the members that are folded for inference, each on a core of its own; small batches
    are computed by all members as one network with stacked parameters, the smallest in the calling thread. Changes of
    the members' weights are noticed (by the tensors' version counters, which only writing to ``parameter.data``
    bypasses), and new copies are made.

    Like any module it can be moved with ``to``, copied and pickled.

    Args:
        members: the networks that predict.
        spec: the spec that they were trained with.
        info: task and shapes.
        classes: names of the classes, in the order of their indices.
        transform: the preparation of images.
        fitted: parameters of the combiner, if a method fits one.
        target_scaling: how real targets were standardised; outputs are then in the original units, float64.
        preparation: what the run's data set needs to prepare new files.
        plans: what each network is. Default: those of the spec.
        methods: the spec's methods with what they remember from training. Default: those of the spec.
    """

    def __init__(
        self,
        members: Sequence[nn.Module],
        spec: Spec,
        info: DataInfo,
        classes: tuple[str, ...] | None = None,
        transform: ImageTransform | None = None,
        fitted: Tensor | None = None,
        target_scaling: TargetScaling | None = None,
        preparation: Mapping[str, Any] | None = None,
        plans: Sequence[NetworkPlan] | None = None,
        methods: Sequence[Method] | None = None,
    ) -> None:
        super().__init__()
        # networks that the spec does not count, such as copies, are like its last one
        self.plans = tuple(plans or (*spec.networks, *[spec.networks[-1]] * len(members))[: len(members)])
        self.methods = tuple(spec.methods if methods is None else methods)
        self.members = nn.ModuleList(members)
        self.spec, self.info, self.classes, self.transform = spec, info, classes, transform
        self.target_scaling, self.preparation = target_scaling, preparation
        self.source: Path | None = None
        """The directory of the run that it was loaded from."""
        self.fitted: Tensor | None
        self.register_buffer("fitted", fitted)
        self.calibration: Calibration | None = None
        """What makes its probabilities calibrated, if the run has kept a calibration; every output includes it."""
        self.conformal: Conformal | None = None
        """Its prediction sets or intervals, if the run has kept them."""
        self._rebuild()

    def _rebuild(self) -> None:
        """Make what a copy does not share."""
        self._objective = run_objective(self.spec, self.info, self.methods)
        self._passes = self._objective.hooks.passes(self.spec.ensemble.members)
        self._pool, self._parallel = ThreadPool(), True
        self._watch: Watch | None = None
        self._copies: MemberCopies | None = None
        self._last_combiner: tuple[tuple[Any, ...], Combiner] | None = None
        self._anytime: dict[float | None, Anytime] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _REBUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rebuild()

    def _apply(self, fn: Any, recurse: bool = True) -> Ensemble:
        self._watch = self._copies = None  # their memory is not needed where the members go
        moved: Ensemble = super()._apply(fn, recurse)
        return moved

    @contextmanager
    def own_threads(self) -> Iterator[None]:
        """Start threads for predictions in a block and stop them at its end; none if torch itself uses only one."""
        before, self._parallel = self._parallel, torch.get_num_threads() > 1
        try:
            yield
        finally:
            self._parallel = before
            self._pool.close()

    @property
    def loss(self) -> Loss:
        """The loss that it was trained with, which also defines what its outputs mean."""
        return self.spec.loss

    @property
    def combiner(self) -> Combiner:
        """How the outputs of its members are combined."""
        return Combiner(
            self._objective,
            len(self._indices),
            self.fitted,
            self.target_scaling,
            self.dtype,
            tuple(self._indices),
            self.spec.known_metrics,
            self.calibration,
            self.conformal,
        )

    def _current_combiner(self) -> Combiner:
        """Return the combiner after a prediction, made anew only if something in it has changed since the last one."""
        parts = (self._watch, self.fitted, self.target_scaling, self.calibration, self.conformal)
        if self._last_combiner is None or not all(map(is_, parts, self._last_combiner[0])):
            self._last_combiner = (parts, self.combiner)
        return self._last_combiner[1]

    @property
    def _indices(self) -> list[int]:
        """The indices of the members that predict in the spec; of the networks, if those are not members."""
        is_member = [plan.group.role == "member" for plan in self.plans]
        plans = [plan for plan, counts in zip(self.plans, is_member, strict=True) if counts or not any(is_member)]
        return [plan.index + number for plan in plans for number in range(plan.members)]

    @property
    def device(self) -> torch.device:
        """The device of its members."""
        tensor = next(chain(self.members.parameters(), self.members.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of its members."""
        tensors = chain(self.members.parameters(), self.members.buffers())
        return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)

    def as_inputs(self, inputs: Any, device: torch.device) -> Tensor:
        """Convert a batch to the members' inputs (B, *input_shape) on a device; a frame of a table is prepared.

        Raises:
            DataError: the inputs have another shape, are not numbers, or lack a column.
        """
        return self._as_inputs(inputs, device, self.dtype)

    def _as_inputs(self, inputs: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
        prepared = prepared_frame(self.spec.data, self.preparation, inputs)
        batch = inputs if prepared is None else prepared.inputs
        return as_inputs(batch, self.info.input_shape, self.transform, device, dtype)

    def member_outputs(self, inputs: Any, enable_grad: bool = False) -> Tensor:
        """Compute the members' raw outputs (M, B, C); (S · M, B, C) of S stochastic passes, the first pass first.

        Outputs of regression are in the original units of the targets, in float64 if those were standardised.

        Args:
            inputs: a batch (B, *input_shape).
            enable_grad: whether the outputs can be differentiated in evaluation mode too, if torch's gradients are
                enabled. In training mode, and if the inputs require gradients, they always can.

        Raises:
            DataError: the inputs have another shape, or are not numbers.
        """
        return self.combiner.restored(self.learned_outputs(inputs, enable_grad))

    def learned_outputs(self, inputs: Any, enable_grad: bool = False) -> Tensor:
        """Compute the members' raw outputs as they learnt them: standardised if the targets were."""
        return self.predictions_of(self.network_outputs(inputs, enable_grad))

    def predictions_of(self, outputs: Tensor) -> Tensor:
        """Return the members' outputs (S · M, B, C) among those of all networks (S · R, B, W)."""
        return self._objective.predictions(outputs, self._num_passes(outputs))

    def _num_passes(self, outputs: Tensor) -> int:
        return len(outputs) // sum(plan.members for plan in self.plans)

    def network_outputs(self, inputs: Any, enable_grad: bool = False, networks: Sequence[int] | None = None) -> Tensor:
        """Compute all outputs (S · R, B, W) of the networks, as they learnt them; arguments as for `member_outputs`.

        With `networks`, only those of these indices are computed.
        """
        watch = self._watch_members()
        inputs = self._as_inputs(inputs, watch.device, watch.dtype)
        in_evaluation = watch.in_evaluation
        with_grad = torch.is_grad_enabled() and (enable_grad or not in_evaluation or inputs.requires_grad)
        is_fast = inputs.device.type == "cpu" and in_evaluation and not with_grad
        is_fast = is_fast and self.spec.engine.precision != "bf16"
        width = None if self._objective.layout is None else self._objective.layout.width
        if is_fast and networks is None and (stacked := self._member_copies(watch).stacked_outputs(inputs)) is not None:
            return pad(stacked, width)
        chosen = range(len(self.members)) if networks is None else networks
        members, plans = [self.members[index] for index in chosen], [self.plans[index] for index in chosen]
        passes = self._passes if in_evaluation else None
        views = [self._view(inputs, plan) for plan in plans]
        with torch.set_grad_enabled(with_grad), nullcontext() if passes is None else self._pool.lock:
            if self.spec.engine.precision == "bf16":
                outputs = [self._in_bf16(*pair, passes) for pair in zip(members, views, strict=True)]
            elif is_fast:
                spread = self._pool.map if self._parallel else lambda work, pairs: list(map(work, pairs))
                outputs = self._member_copies(watch).outputs(chosen, views, passes, spread)
            else:
                outputs = [outputs_of_passes(*pair, passes) for pair in zip(members, views, strict=True)]
            # (S, B, C) of a member, (S, K, B, C) of a family
            rows = [pad(each if each.ndim == 4 else each.unsqueeze(1), width) for each in outputs]
            return torch.cat(rows, dim=1).flatten(0, 1)

    def _view(self, inputs: Tensor, plan: NetworkPlan) -> Tensor:
        """Return what a network sees of the inputs."""
        hooks = self._objective.members
        if not hooks.have_views:
            return inputs
        keys = MemberUniform.keys_of(self.spec.seed, [plan.index], inputs.device)
        members = torch.tensor([plan.index], device=inputs.device)
        return hooks.views(inputs, members, MemberUniform(keys, 0), training=False)[0]

    @staticmethod
    def _in_bf16(member: nn.Module, inputs: Tensor, passes: int | None) -> Tensor:
        """Compute a member in the precision of its run, as it was evaluated in training."""
        with torch.autocast(inputs.device.type, torch.bfloat16):
            return outputs_of_passes(member, inputs, passes).float()

    def _watch_members(self) -> Watch:
        """Return what watches the members, renewed if they have other layers or tensors."""
        if self._watch is None or not self._watch.is_same_structure:
            self._watch, self._copies = Watch(self.members), None
        return self._watch

    def _member_copies(self, watch: Watch) -> MemberCopies:
        """Return copies of the members with their current weights."""
        if self._copies is None or not self._copies.is_current:
            channels_last = all("channels_last" not in plan.group.model.unsupported() for plan in self.plans)
            stochastic = self._passes is not None
            self._copies = MemberCopies(list(self.members), watch, channels_last, self._can_stack(), stochastic)
        return self._copies

    def _can_stack(self) -> bool:
        """Return whether the members may be computed as one network with stacked parameters."""
        model = self.plans[0].group.model
        if len({plan.group.model.key for plan in self.plans}) > 1 or len(self.members) < 2 or self._passes is not None:
            return False
        is_trained_alone = not isinstance(model, Family) and not model.fitted
        return is_trained_alone and "vmap" not in model.unsupported() and not self._objective.members.have_views

    def forward(self, inputs: Any, enable_grad: bool = False) -> Tensor:
        """Compute the ensemble's raw output (B, C); arguments as for `member_outputs`."""
        outputs = self.network_outputs(inputs, enable_grad)
        combiner = self._current_combiner()
        return combiner.restored(combiner.combine_networks(outputs, self._num_passes(outputs)))

    def combine_networks(self, outputs: Tensor) -> Tensor:
        """Combine the outputs of all networks to the ensemble's, as it learnt them."""
        return self.combiner.combine_networks(outputs, self._num_passes(outputs))

    def combine(self, outputs: Tensor) -> Tensor:
        """Combine the members' outputs, as `member_outputs` returns them, to the ensemble's output (B, C)."""
        return self.combiner.combine(outputs)

    def combine_learned(self, outputs: Tensor) -> Tensor:
        """Combine the members' outputs, as `learned_outputs` returns them."""
        return self.combiner.combine_learned(outputs)

    @property
    def is_stochastic(self) -> bool:
        """Whether its members are stochastic passes of its networks."""
        return self._passes is not None

    @property
    def num_passes(self) -> int | None:
        """The number of stochastic passes of each network in a prediction; None: one deterministic pass."""
        return self._passes

    def anytime(self, risk: float | None = None) -> Anytime:
        """Return what predicts with as few members as each sample needs; see `predict_proba`."""
        if risk not in self._anytime:
            self._anytime[risk] = Anytime.of(self, risk)
        return self._anytime[risk]

    def predict_proba(
        self, inputs: Any, enable_grad: bool = False, stop_when_sure: bool = False, risk: float | None = None
    ) -> Tensor:
        """Compute the probabilities of the classes or labels (B, K); arguments as for `member_outputs`.

        Args:
            inputs: a batch (B, *input_shape).
            enable_grad: as for `member_outputs`.
            stop_when_sure: ask members one after the other, the most valuable first, and for each sample only until the
                rest cannot change the predicted class. The probabilities are those of the members that were asked;
                ``anytime()(inputs)`` also says how many. Exact for the combiners `probabilities` and `vote`.
            risk: with `stop_when_sure`: stop earlier, so that at most this share of the predicted classes is expected
                to differ. Fitted to the validation outputs that the run has kept; for any combiner.

        Raises:
            UsageError: the run is a regression, or its members cannot be asked one by one.
            DataError: the inputs have another shape, or are not numbers.
            NumericError: an output is not finite.
        """
        if not TASKS[self.info.task].has_probabilities:
            raise UsageError("a regression has no class probabilities", "predict_proba", "use predict")
        if stop_when_sure:
            return self.anytime(risk)(inputs).probabilities
        if risk is not None:
            raise UsageError("a risk is for predictions that stop early", "risk", "add stop_when_sure=True")
        outputs = self.network_outputs(inputs, enable_grad)
        check_finite(outputs, lambda index: f"input {index}")
        combiner = self._current_combiner()
        return self.loss.probabilities(combiner.restored(combiner.combine_networks(outputs, self._num_passes(outputs))))

    def predict_sets(self, inputs: Any) -> list[list[str]] | list[list[int]]:
        """Predict a set of classes for each input, which holds the true one with the probability of the run's sets.

        Args:
            inputs: a batch (B, *input_shape).

        Returns:
            For each input the classes of its set, the most probable first: names, or indices if the classes have no
            names. A set may be empty: no class is as plausible as the true ones of the validation data.

        Raises:
            UsageError: the run has no prediction sets.
            DataError: the inputs have another shape, or are not numbers.
            NumericError: an output is not finite.
        """
        conformal = self._conformal(for_classes=True)
        with torch.no_grad():
            outputs = self.network_outputs(inputs)
            check_finite(outputs, lambda index: f"input {index}")
            probabilities = self.loss.probabilities(self.combine_networks(outputs).double()).cpu()
        return self.named_sets(probabilities, conformal.sets(probabilities, self.set_randomness(inputs)))

    def set_randomness(self, inputs: Any) -> Tensor:
        """Return the uniform random numbers (B,) of prediction sets, which depend on the seed and each input alone."""
        return uniform_by_input(self.spec.seed, self.as_inputs(inputs, torch.device("cpu")))

    def named_sets(self, probabilities: Tensor, sets: Tensor) -> list[list[str]] | list[list[int]]:
        """Return the classes of sets, bool (B, K), by their probabilities (B, K)."""
        order = probabilities.argsort(dim=-1, descending=True, stable=True)
        indices = [row[chosen].tolist() for row, chosen in zip(order, sets.gather(-1, order), strict=True)]
        return indices if self.classes is None else [[self.classes[index] for index in row] for row in indices]

    def predict_interval(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Predict an interval of values for each input, which holds the true one with the probability of the run's.

        Args:
            inputs: a batch (B, *input_shape).

        Returns:
            The lower and the upper ends (B, C), float64, in the original units.

        Raises:
            UsageError: the run has no intervals.
            DataError: the inputs have another shape, or are not numbers.
            NumericError: an output is not finite.
        """
        conformal = self._conformal(for_classes=False)
        with torch.no_grad():
            outputs = self.network_outputs(inputs)
            check_finite(outputs, lambda index: f"input {index}")
            combined = self.combine_networks(outputs)
            values, spreads = values_and_spreads(self.combiner, self.predictions_of(outputs), combined)
            half = conformal.half_widths(spreads)
        return values - half, values + half

    def _conformal(self, for_classes: bool) -> Conformal:
        if self.conformal is None or self.conformal.is_for_classes != for_classes:
            what = "the run has no prediction " + ("sets" if for_classes else "intervals")
            fix = "ensemblekit conform RUN --error 0.1, then load it again"
            if (self.info.task == "classification") != for_classes:
                fix = "use predict_interval" if for_classes else "use predict_sets"
            raise UsageError(what, "predict_sets" if for_classes else "predict_interval", fix)
        return self.conformal

    def predict(self, inputs: Any) -> Tensor | NDArray[np.str_]:
        """Predict classes or values.

        Args:
            inputs: a batch (B, *input_shape).

        Returns:
            For classification an array (B,) of class names, or a tensor (B,) of class indices if the classes have no
            names; for multi-label targets a tensor (B, C) of bool: the labels of each input; for regression a tensor
            (B, C) of values: the point predictions that the outputs mean.

        Raises:
            DataError: the inputs have another shape, or are not numbers.
            NumericError: an output is not finite.
        """
        with torch.no_grad():
            outputs = self.network_outputs(inputs)
            check_finite(outputs, lambda index: f"input {index}")
            combined = self.combiner.restored(self.combine_networks(outputs))
            return TASKS[self.info.task].predict(combined, self.loss, self.classes)
