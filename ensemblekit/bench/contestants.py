"""The contestants of a workload: the hand-written loop, and every engine or class of this package that can run it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from adabelief_pytorch import AdaBelief
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torchvision import transforms

from ensemblekit.bench.exported_graph import ONNXRUNTIME, missing_packages, onnx_step
from ensemblekit.bench.naive_loop import NAIVE_LOSSES, NaiveLoop, naive_outputs
from ensemblekit.bench.subprocesses import SubprocessContestant
from ensemblekit.bench.timing import count_flops
from ensemblekit.bench.workloads import SEED, Workload
from ensemblekit.core.memory import keep_freed_memory
from ensemblekit.core.seeds import generator
from ensemblekit.data.in_memory import data_from_datasets
from ensemblekit.engines.selection import Choice, choose_engine, engine_class
from ensemblekit.engines.timed_steps import Work
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.members.state import MemberState
from ensemblekit.spec.optimizers import AnyOptimizer, optimizer_classes
from ensemblekit.spec.sections import ENGINES

NAIVE = "naive"
OURS = "ensemblekit"
Round = Callable[[], object]
"""Runs all steps of one round."""
Maker = Callable[[ExitStack], Round]
"""Prepares a contestant; the stack releases its resources."""


@dataclass(frozen=True)
class Contest:
    """All contestants of one workload on this machine."""

    makers: Mapping[str, Maker]
    """The naive loop first. Each is built separately, so that a process can hold one of them alone."""
    cannot_run: Mapping[str, str] = field(default_factory=dict)
    """The engines that cannot run the workload, each with the reason."""
    flops_of_step: Callable[[], int] | None = None
    """Floating-point operations of one step: of the members that are trained, or of all members in inference."""
    choose_engine: Callable[[], Choice] | None = None
    """Chooses an engine as `auto` does in a long run."""


def naive_subprocess(workload: Workload, device: torch.device) -> SubprocessContestant:
    """The naive loop in a process of its own."""
    return SubprocessContestant(partial(_naive_round, workload, device))


def _naive_round(workload: Workload, device: torch.device) -> Round:
    return contest_of(workload, device).makers[NAIVE](ExitStack())


def contest_of(workload: Workload, device: torch.device) -> Contest:
    """All contestants that can run this workload on this device."""
    kinds = {"training": training_contest, "inference": inference_contest, "pipeline": pipeline_contest}
    return kinds[workload.kind](workload, device)


def repeated(step: Callable[[], object], steps: int) -> Round:
    """A round of `steps` identical steps."""

    def work() -> None:
        for _ in range(steps):
            step()

    return work


def training_contest(workload: Workload, device: torch.device) -> Contest:
    """Training steps by each engine."""
    settings = workload.settings(device)
    members = workload.members(device)
    reasons = {name: engine_class(name).unsupported(members, settings) for name in ENGINES}
    batch, weights = workload.batch(device), workload.sample_weights(device)

    def naive(stack: ExitStack) -> Round:
        loop = naive_loop(workload, workload.members(device))
        return repeated(lambda: loop.step(batch.inputs, batch.targets, weights), workload.steps)

    def engine(name: str, stack: ExitStack) -> Round:
        keep_freed_memory()
        running = engine_class(name)(workload.members(device), workload.objective(), settings)
        stack.callback(running.close)
        steps = count()
        rate = workload.learning_rate
        return repeated(lambda: running.train_step(batch, weights, rate, next(steps)), workload.steps)

    def flops() -> int:
        trained = naive_loop(workload, [member for member in workload.members(device) if not member.frozen])
        return count_flops(lambda: trained.step(batch.inputs, batch.targets, weights))

    return Contest(
        {NAIVE: naive, **{name: partial(engine, name) for name, reason in reasons.items() if reason is None}},
        {name: reason for name, reason in reasons.items() if reason is not None},
        flops,
        lambda: choose_engine(Work(members, workload.objective(), settings, batch, weights)),
    )


def naive_loop(workload: Workload, members: list[MemberState]) -> NaiveLoop:
    """The hand-written loop over the networks of these members; frozen copies run but are not trained."""
    for member in members:
        member.network.train(not member.frozen).requires_grad_(not member.frozen)
    networks = [member.network for member in members]
    return NaiveLoop(networks, NAIVE_LOSSES[workload.naive], partial(published_optimizer, workload.run_spec.optimizer))


def published_optimizer(optimizer: AnyOptimizer, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer as its package publishes it, not as engines build it."""
    optimizer_class = AdaBelief if optimizer.name == "adabelief" else optimizer_classes()[optimizer.name]
    with redirect_stdout(None):  # AdaBelief prints its settings
        built: torch.optim.Optimizer = optimizer_class(parameters, **optimizer.model_dump(exclude={"name"}))
    return built


def inference_contest(workload: Workload, device: torch.device) -> Contest:
    """Predictions of a trained ensemble."""
    inputs = workload.batch(device).inputs
    predicting = torch.inference_mode()

    def naive(stack: ExitStack) -> Round:
        networks = [member.network.eval() for member in workload.members(device)]
        return predicting(repeated(lambda: naive_outputs(networks, inputs), workload.steps))

    def trained() -> Ensemble:
        networks = [member.network for member in workload.members(device)]
        return Ensemble(networks, workload.run_spec, workload.info).eval()

    def ours(stack: ExitStack) -> Round:
        keep_freed_memory()
        ensemble = trained()
        return predicting(repeated(lambda: ensemble(inputs), workload.steps))

    def exported(stack: ExitStack) -> Round:
        return repeated(onnx_step(trained(), inputs, stack), workload.steps)

    def flops() -> int:
        networks = [member.network.eval() for member in workload.members(device)]
        with torch.no_grad():
            return count_flops(lambda: naive_outputs(networks, inputs))

    reason = "its graph is run on the CPU here" if device.type != "cpu" else missing_packages()
    makers: dict[str, Maker] = {NAIVE: naive, OURS: ours, **({} if reason else {ONNXRUNTIME: exported})}
    return Contest(makers, {ONNXRUNTIME: reason} if reason else {}, flops)


def pipeline_contest(workload: Workload, device: torch.device, images: Tensor | None = None) -> Contest:
    """Epochs over uint8 images (N, 3, H, W), random ones by default: crop, flip and normalise; a step is a batch."""
    if images is None:
        shape = (workload.steps * workload.batch_size, *workload.input_shape)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator(SEED, "bench"))
    samples = (images, torch.zeros(len(images), dtype=torch.int64))
    train = data_from_datasets(
        samples, samples, SEED, augment=("crop", "flip"), normalise=True, validation_fraction=0
    ).train.to(device)
    epochs = count()

    def naive(stack: ExitStack) -> Round:
        loader = DataLoader(PerImage(images), workload.batch_size, shuffle=True)
        return lambda: deque((inputs.to(device) for inputs, _ in loader), maxlen=1)

    def ours(stack: ExitStack) -> Round:
        return lambda: deque(train.training_batches(workload.batch_size, SEED, next(epochs)), maxlen=1)

    return Contest({NAIVE: naive, OURS: ours})


class PerImage(TorchDataset[tuple[Tensor, int]]):
    """Images that go through torchvision's transforms one by one, as in its own data sets."""

    def __init__(self, images: Tensor) -> None:
        self.images = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(tuple(images.shape[-2:]), padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.5,) * images.shape[1], (0.25,) * images.shape[1]),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), 0
