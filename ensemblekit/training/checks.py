"""What is checked before anything is trained, and before anything is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ensemblekit.core.composition import PROGRESS, check_composition
from ensemblekit.core.errors import NumericError, UsageError
from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.objective import Moment, Objective
from ensemblekit.core.plugin import PREDICTED, Family
from ensemblekit.core.seeds import generator
from ensemblekit.core.tasks import TASKS
from ensemblekit.core.tensors import grouped
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.data.loading import Batch, Data
from ensemblekit.spec.sections import Spec
from ensemblekit.training.statistics import LOWER_RATE

MAX_CLASSES = 5
"""How many missing classes a notice lists."""


def check_settings(spec: Spec, data: Data) -> None:
    """Raise a `UsageError` for a setting that would have no effect on this data."""
    if data.validation is not None:
        return
    settings = {"training.patience": spec.training.patience is not None, "training.keep": spec.training.keep == "best"}
    for key, is_set in settings.items():
        if is_set:
            what = f"{key} needs validation data, and there is none"
            raise UsageError(what, "data.validation_fraction", f"set it to more than 0, or remove {key}")


def settings_notices(spec: Spec, data: Data) -> Iterator[str]:
    """Yield what to know about settings that have less effect than they seem to."""
    batch_size, samples = spec.training.batch_size, len(data.train)
    if batch_size > samples:
        yield f"training.batch_size is {batch_size}, but there are only {samples} training samples: each step uses all"
    targets, info = data.train.targets, data.info
    missing = [] if targets.is_meta else TASKS[info.task].missing(targets, info.num_outputs)
    if missing:
        yield _missing_classes_text(missing, data)
    if method := _sets_every_rate(spec):
        yield f'training.schedule has no effect: "{method}" sets the learning rate of every step'


def _sets_every_rate(spec: Spec) -> str:
    """Return the method that takes the place of a schedule that would change the learning rate; "" if none does."""
    num_epochs = spec.training.epochs
    epochs = [num_epochs * share for share in PROGRESS]
    if all(spec.schedule.factor(epoch, num_epochs) == 1 for epoch in epochs):
        return ""
    hooks = RunHooks(spec.methods)
    rates = {"base": spec.optimizer.learning_rate, "num_epochs": num_epochs}
    setting = [hooks.first_result("learning_rate", **rates, epoch=epoch)[0] for epoch in epochs]
    return setting[0] if all(setting) else ""


def _missing_classes_text(missing: list[int], data: Data) -> str:
    names = ", ".join(map(str, missing[:MAX_CLASSES]))
    more = f" and {len(missing) - MAX_CLASSES} more" if len(missing) > MAX_CLASSES else ""
    plural = PREDICTED[data.info.task]
    singular = {"classes": "class", "labels": "label"}.get(plural, plural)
    classes = f"{singular if len(missing) == 1 else plural} {names}{more}"
    # a class in the middle may be rare, or lost to data.limit_train
    question = ": are the classes numbered from 0?" if missing[0] == 0 and not data.classes else ""
    return f"no training sample has {classes} of 0 to {data.info.num_outputs - 1}{question}"


def check_methods(spec: Spec, objective: Objective, batch: Batch) -> None:
    """Raise a `UsageError` if something that a method says would be ignored."""
    if not batch.targets.is_meta:
        outputs = random_outputs(objective, spec.ensemble.members, batch.targets)
        check_composition(objective, outputs, batch.targets, spec.training.epochs)


def random_outputs(objective: Objective, num_members: int, targets: Tensor) -> Tensor:
    """Return random outputs (R, B, W) of all networks, for a trial of the hooks."""
    layout = objective.layout
    assert layout is not None
    shape = (num_members + layout.num_auxiliary, len(targets), layout.width)
    return torch.rand(shape, generator=generator(0, "check methods")).to(targets.device)


def check_weights_count(objective: Objective, batch: Batch, weights: Tensor | None) -> None:
    """Raise a `UsageError` if sample weights (B, M) do not change the objective, so that a method has no effect.

    It is tried on random outputs: the derivative of the objective with respect to every weight is zero then, at any
    moment of training.
    """
    if weights is None or weights.is_meta:
        return
    outputs = random_outputs(objective, weights.shape[1], batch.targets)
    variable = weights.detach().float().requires_grad_()
    for progress in PROGRESS:
        value = objective(outputs, batch.targets, variable, moment=Moment(progress=progress))
        (gradient,) = torch.autograd.grad(value, variable, allow_unused=True)
        if gradient is not None and bool((gradient != 0).any()):
            return
    names = {hook: _names_of(objective, hook) for hook in ("sample_weights", "member_loss")}
    others = f" with {names['member_loss']}" if names["member_loss"] else ""
    what = f"the sample weights of {names['sample_weights']} have no effect{others}: no member has a loss of its own"
    raise UsageError(what, "method", f"remove {names['sample_weights']}, or choose a method with member losses")


def _names_of(objective: Objective, hook: str) -> str:
    return ", ".join(f'"{method.name}"' for method in objective.methods if hook in implemented_hooks(type(method)))


def check_tensors(tensors: Mapping[str, Tensor], when: str, kept: str) -> None:
    """Raise a `NumericError` if a tensor of a checkpoint, `members.INDEX.…` or `optimizer.INDEX.…`, is not finite.

    Args:
        tensors: those that are about to be saved.
        when: the moment of training.
        kept: says which checkpoint is kept.
    """
    floats = {name: value for name, value in tensors.items() if value.is_floating_point() and not value.is_meta}
    flags: dict[torch.device, list[Tensor]] = {}
    for group in grouped(floats.values()):
        joined = group[0] if len(group) == 1 else torch.cat([value.reshape(-1) for value in group])
        flags.setdefault(joined.device, []).append(joined.isfinite().all())
    if all(bool(torch.stack(finite).all()) for finite in flags.values()):
        return
    kind, index, *_ = next(name for name, value in floats.items() if not bool(value.isfinite().all())).split(".")
    owners = {"members": f"the weights of member {index}", "methods": f'the state of method "{index}"'}
    what = owners.get(kind, f"the optimizer's state of member {index}")
    raise NumericError(f"{what} became nan or infinite by {when}", kept, LOWER_RATE)


def check_members(spec: Spec, objective: Objective, passes: int | None) -> None:
    """Raise a `UsageError` if methods ask for something that some networks or other methods do not allow."""
    hooks = objective.members
    if hooks.have_second_inputs and hooks.have_second_weights:
        names = ", ".join(_names_of(objective, hook) for hook in ("second_inputs", "second_weights"))
        raise UsageError(f"{names} both need a second pass in every step", "method", "use one of them")
    for plan in spec.networks:
        model = plan.group.model
        if hooks.have_views and isinstance(model, Family):
            what = f'{_names_of(objective, "member_inputs")} gives each member its own inputs, but "{model.name}" '
            what += "computes all members from the same ones"
            raise UsageError(what, "model", "use a model whose members are networks of their own")
    if objective.predictor is not None:
        _check_predictor(spec, objective.predictor)


def _check_predictor(spec: Spec, name: str) -> None:
    names = [group.name for group in spec.auxiliary_groups]
    if name not in names:
        what = f'a method predicts with the auxiliary group "{name}", and the spec has none of that name'
        raise UsageError(what, "ensemble.groups", f'add [[ensemble.groups]] with role = "auxiliary", name = "{name}"')
