"""Trains several runs together: all take their steps in one stack, and each keeps its own directory and result.

The runs advance in rounds. In each round those that are furthest behind take one step and all that follows it, up to
their next step: statistics, evaluations, checkpoints. A run that fails or ends leaves the others alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ensemblekit.core.errors import Interrupted
from ensemblekit.core.registry import Registry
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.data.loading import Data
from ensemblekit.engines.selection import preferred_engine
from ensemblekit.engines.stacked import Stack, StackedEngine
from ensemblekit.engines.together import SharedStack
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.sections import Spec
from ensemblekit.training.interruption import StopRequest, stop_requests
from ensemblekit.training.only_run import only_run_of_process
from ensemblekit.training.sessions import steps_of
from ensemblekit.training.trainer import Steps, Trainer

MAX_RUNS = 32
"""Runs that share a stack, at most."""
MAX_WEIGHT_BYTES = 2**26
"""Size of the weights of a stack, at most: with gradients, optimizer and activations it takes several times as much."""
OWN_STEPS = {
    "second_inputs": "computes a second pass",
    "second_weights": "computes a second pass",
    "member_inputs": "gives each member its own inputs",
    "weight_penalty": "penalises weights",
    "learning_rate": "sets the learning rate",
    "members_at_start": "adds, copies or freezes members",
    "epoch_started": "may change members between epochs",
    "epoch_trained": "may change members between epochs",
}
"""Hooks of methods by which a run takes other steps than the runs beside it, and what such a method does."""


@dataclass(frozen=True)
class RunToTrain:
    """A run that is trained together with others."""

    name: str
    spec: Spec
    path: Path
    resume: bool
    """Whether there is a run to continue."""
    listeners: Sequence[object] = ()


def reason_alone(spec: Spec) -> str | None:
    """Return why the runs of a spec cannot share a stack, as far as the spec alone says so; None if they can."""
    if spec.engine.name not in ("auto", StackedEngine.name):
        return f'it has the engine "{spec.engine.name}"'
    for method in spec.methods:
        hooks = implemented_hooks(type(method))
        if does := next((text for hook, text in OWN_STEPS.items() if hook in hooks), None):
            return f'the method "{method.name}" {does}'
    return None


def runs_per_stack(spec: Spec, data: Data) -> tuple[int, str]:
    """Return how many runs of a spec may share a stack, and if that is one, why."""
    with tempfile.TemporaryDirectory() as directory, torch.random.fork_rng():
        trainer = Trainer(spec, RunDirectory(Path(directory)), data)
    networks, settings = trainer.members.networks, trainer.settings
    if any(member.uses_global_rng for member in networks):
        return 1, "its networks use torch's global random generator"
    if reason := StackedEngine.unsupported(networks, settings):
        return 1, reason
    if spec.engine.name == "auto" and preferred_engine(networks, settings) != StackedEngine.name:
        return 1, "a stack of convolutions is slow on a CPU"
    parts = StackedEngine(networks, trainer.objective, settings).parts
    if len(parts) != 1 or not isinstance(parts[0], Stack) or parts[0].frozen:
        return 1, "its networks are not all of one architecture"
    num_bytes = sum(value.nbytes for member in networks for value in member.network.parameters())
    number = min(MAX_WEIGHT_BYTES // num_bytes, MAX_RUNS)
    return (number, "") if number > 1 else (1, "its networks are too large to share a stack")


def train_together(
    runs: Sequence[RunToTrain],
    data: Data,
    registry: Registry,
    ended: Callable[[RunToTrain, BaseException | None], None],
) -> None:
    """Train runs that differ only in the parameters of methods and in the seed, in one stack.

    Args:
        runs: the runs.
        data: their data.
        registry: their plugins.
        ended: called as soon as a run has ended, with its error if it has failed.

    Raises:
        Interrupted: by Ctrl-C or a signal; every run is saved.
    """
    with only_run_of_process(), stop_requests() as asked, torch.random.fork_rng():
        asked.outcome = ("stopped at once: the last checkpoint of each run is kept", "", "")
        stop, shared = StopRequest(), SharedStack()
        waiting: dict[int, int] = dict.fromkeys(range(len(runs)), -1)
        """The step that each run waits for; -1: it has not started."""
        steps = [steps_of(run.spec, run.path, run.resume, registry, run.listeners, data, stop, shared) for run in runs]
        interrupted: Interrupted | None = None
        with asked.awaited(), _told_of_stop(steps):
            while waiting:
                # once in a round, so that all runs are saved at the same step
                stop.signal_number = asked.signal_number
                first = min(waiting.values())
                for index in [index for index, step in waiting.items() if step == first]:
                    try:
                        waiting[index] = next(steps[index])
                    except StopIteration:
                        del waiting[index]
                        ended(runs[index], None)
                    except Interrupted as error:
                        del waiting[index]
                        interrupted = error
                    except (Exception, SystemExit) as error:  # a plugin may raise anything
                        del waiting[index]
                        ended(runs[index], error)
        if interrupted is not None:
            raise interrupted


@contextmanager
def _told_of_stop(steps: Sequence[Steps]) -> Iterator[None]:
    """Tell all runs that are not over when a signal stops the program at once."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        for run in steps:
            try:
                run.throw(stopped)
            except (KeyboardInterrupt, StopIteration):
                continue
        raise
