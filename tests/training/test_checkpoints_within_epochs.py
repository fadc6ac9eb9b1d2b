"""A long epoch is saved in its middle, and a run that is resumed there ends as if nothing had happened."""

from __future__ import annotations

import pytest
import torch
from helpers.places import TOY_PLUGINS
from helpers.small_runs import Crash, CrashOnSave, assert_same_run, checkpoints, small_spec, training

import ensemblekit as ek
from ensemblekit.core.hookspecs import hookimpl
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.display.progress import Progress
from ensemblekit.spec.sections import ENGINES
from ensemblekit.training import statistics as statistics_module
from ensemblekit.training.statistics import EpochStatistics

EVERY_STEP = 1e-9
METHODS = [
    {"name": "gncl"},
    {"name": "bagging"},
    {"name": "boosting", "schedule": "stagewise"},
    {"name": "snapshot", "at_epochs": [2, 3]},
    {"name": "adaboost"},
    {"name": "swa", "start": 0.5},
]


def train_and_resume(spec: dict, folder, epoch: int, step: int, **options) -> ek.Run:
    """Train the spec to the end, and again with a crash in the middle of an epoch and a resume."""
    ek.train(ek.load_spec(spec, **options), folder / "whole", progress=False, **options)
    often = ek.load_spec(spec, {"training.checkpoint_every_minutes": EVERY_STEP}, **options)
    with pytest.raises(Crash):
        ek.train(often, folder / "stopped", progress=CrashOnSave(epoch, step), **options)
    assert checkpoints(folder / "stopped")[-1] == f"epoch-{epoch:06}-step-{step:06}"
    return ek.resume(folder / "stopped", progress=False, **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["name"])
def test_a_run_that_is_resumed_in_the_middle_of_an_epoch_is_bit_identical(method, engine, tmp_path):
    """With dropout, batch norm and augmentation; methods that add or copy members do so once, at the epoch's start."""
    spec = small_spec(method=method, engine={"name": engine, "device": "cpu"})
    run = train_and_resume(spec, tmp_path, epoch=1, step=2)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert len(run.members) == 3


@pytest.mark.parametrize("storage", ["memory", "stream"])
def test_a_network_that_uses_the_global_generator_goes_on_with_its_random_numbers(storage, tmp_path):
    spec = small_spec(model={"name": "noisy"}, data={**small_spec()["data"], "storage": storage})
    train_and_resume(spec, tmp_path, epoch=2, step=3, plugins=[TOY_PLUGINS])
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_where_sums_are_made_does_not_depend_on_where_checkpoints_are(tmp_path, monkeypatch):
    """Steps are summed two by two here, so that an odd number of them is pending in the checkpoint."""
    monkeypatch.setattr(statistics_module, "PENDING_BYTES", 2 * 3 * 50 * 10 * 4)
    train_and_resume(small_spec(method="gncl"), tmp_path, epoch=0, step=3)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_samples_of_the_steps_before_are_not_read_again(tmp_path):
    class Images:
        """Counts what is read."""

        def __init__(self, images) -> None:
            self.images, self.read = images, []

        def __len__(self) -> int:
            return len(self.images)

        def __getitem__(self, index):
            self.read.append(index)
            return self.images[index], index % 2

    given = Images(torch.rand(40, 3))
    data = (given, (torch.rand(10, 3), torch.arange(10) % 2))
    spec = {
        "data": {"name": "given", "storage": "stream", "validation_fraction": 0.0},
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"epochs": 1, "batch_size": 10, "checkpoint_every_minutes": EVERY_STEP},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "run", data=data, progress=CrashOnSave(0, 3))

    class Forget(Progress):
        @hookimpl
        def epoch_started(self):
            given.read.clear()

    ek.resume(tmp_path / "run", data=data, progress=Forget())
    assert len(given.read) == 10


def test_an_epoch_without_a_long_pause_has_no_checkpoint_inside(tmp_path):
    class Saved(Progress):
        def __init__(self) -> None:
            self.moments = []

        @hookimpl
        def checkpoint_saved(self, epoch, step):
            self.moments.append((epoch, step))

    saved = Saved()
    ek.train(small_spec(training=training(epochs=2)), tmp_path / "run", progress=saved)
    assert saved.moments == [(0, 0), (1, 0), (2, 0)]


def test_what_the_statistics_of_an_epoch_save_is_all_they_need():
    objective = Objective([], CrossEntropy())
    generator = torch.Generator().manual_seed(0)
    steps = [(torch.rand((), generator=generator), torch.randn(2, 5, 3, generator=generator)) for _ in range(4)]
    batch = Batch(torch.zeros(5, 1), torch.tensor([0, 1, 2, 1, 0]), torch.arange(5))
    whole, first, second = (EpochStatistics(objective, [0, 1]) for _ in range(3))
    for value, outputs in steps:
        whole.add(value, outputs, batch)
    for value, outputs in steps[:3]:
        first.add(value, outputs, batch)
    second.restore(first.tensors(), first.state())
    second.add(*steps[3], batch)
    for statistics in (whole, second):
        statistics.check_finite(1, "")
    assert second.means() == whole.means()
    assert (second.num_steps, second.num_samples) == (4, 20)
