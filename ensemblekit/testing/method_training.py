"""The contract of a method in training: all engines agree, and a run that was stopped goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ensemblekit.core.seeds import generator
from ensemblekit.data.loading import Batch
from ensemblekit.display.progress import Progress
from ensemblekit.engines import ENGINES, Settings, Slot, unsupported
from ensemblekit.members.build import build_members
from ensemblekit.testing.checks import ContractError, difference, look_at
from ensemblekit.testing.method_fixture import MethodBench
from ensemblekit.testing.toy_run import BATCH_SIZE, CopyAfter, empty_directory, trained_tensors
from ensemblekit.training.runs import resume_run, train_run

STEPS = 3
AGREEMENT = 1e-5
"""What engines may differ by, in float32."""
NOT_RESULTS = {"seconds", "images_per_second"}


def engines_agree(bench: MethodBench) -> None:
    """A few real steps with each engine that can run here, compared with the sequential one."""
    expected = _steps(bench, "sequential")
    assert expected is not None  # it runs everywhere
    for name in sorted(set(ENGINES) - {"sequential"}):
        found = _steps(bench, name)
        if found is None:
            continue
        for what, left, right in zip(("objectives", "outputs"), found, expected, strict=True):
            if wrong := difference(left, right, AGREEMENT):
                hooks = bench.hooks()
                raise ContractError(
                    f"the {what} of the sequential engine after {STEPS} steps, to {AGREEMENT}",
                    f"with the {name} engine {wrong}",
                    look_at(bench.method_class, hooks[0] if hooks else ""),
                    "hooks may run on one member's outputs or all, in any thread: use only their arguments",
                )


def _steps(bench: MethodBench, engine_name: str) -> tuple[Tensor, Tensor] | None:
    """The objectives of some steps and the outputs (M, B, C) after them; None if the engine cannot run this."""
    spec, info = bench.spec, bench.spec.data.info
    assert info is not None
    num_outputs = spec.loss.num_outputs(info)
    networks = build_members(spec.member_models, info.input_shape, num_outputs, seed=0)
    slots = [Slot(network, spec.model, member) for member, network in enumerate(networks)]
    settings = Settings(torch.device("cpu"), spec.optimizer.build, passes=bench.objective.passes(bench.members))
    if unsupported(engine_name, slots, settings, spec.optimizer.name) is not None:
        return None
    weights = bench.objective.sample_weights(BATCH_SIZE, len(slots), seed=0)
    batches = [_batch(bench, step) for step in range(STEPS)]
    engine = ENGINES[engine_name](slots, bench.objective, settings)
    try:
        values = [engine.train_step(batch, weights, 0.1, step)[0] for step, batch in enumerate(batches)]
        return torch.stack(values), engine.predict(batches[0].inputs)
    finally:
        engine.close()


def _batch(bench: MethodBench, step: int) -> Batch:
    info = bench.spec.data.info
    assert info is not None
    random = generator(0, "contract", "batch", step)
    inputs = torch.randn(BATCH_SIZE, *info.input_shape, generator=random)
    if info.task == "regression":
        targets = torch.randn(BATCH_SIZE, info.num_outputs, generator=random)
    else:
        targets = torch.randint(info.num_outputs, (BATCH_SIZE,), generator=random)
    return Batch(inputs, targets, torch.arange(BATCH_SIZE))


def resumes(bench: MethodBench) -> None:
    """A run, and one that goes on from a copy of it as it was half-way, end with the same bits."""
    spec = bench.spec
    half = spec.training.epochs // 2
    with empty_directory() as folder:
        whole, copy = Path(folder, "whole"), Path(folder, "stopped")
        expected = train_run(spec, whole, None, CopyAfter(half, whole, copy), bench.registry)
        found = resume_run(copy, None, Progress(), bench.registry)
        left, right = trained_tensors(copy), trained_tensors(whole)
    changed = sorted(left.keys() ^ right.keys())
    changed = changed or [name for name in left if not torch.equal(left[name], right[name])]
    for first, second in zip(found.history, expected.history, strict=False):
        for name in sorted((first.keys() | second.keys()) - NOT_RESULTS):
            if first.get(name) != second.get(name):
                changed.append(f"{name} of epoch {second['epoch']}")
    if changed or len(found.history) != len(expected.history):
        life_cycle = bench.hooks(("epoch_started", "learning_rate", "members_at_start", "epoch_finished"))
        raise ContractError(
            f"a run that is taken up after epoch {half} of {spec.training.epochs} to end with the same bits",
            f"{len(changed)} differences, first {changed[0]}" if changed else "another number of epochs",
            look_at(bench.method_class, (life_cycle or bench.hooks() or [""])[0]),
            "keep nothing in the method between epochs: derive everything from epoch, num_epochs and the ensemble",
        )


RUN_CHECKS: dict[str, Callable[[MethodBench], None]] = {
    "all engines give the same numbers": engines_agree,
    "a run that was stopped goes on bit for bit": resumes,
}
