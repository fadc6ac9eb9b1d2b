"""Hooks of the objective may ask when in training they are called, and for which members."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from helpers.small_runs import small_spec, training

import ensemblekit as ek
from ensemblekit import Method, hookimpl

ENGINES = ("sequential", "threaded", "stacked")


class Witness(Method):
    """Notes what it is told."""

    noted: ClassVar[list] = []

    @hookimpl
    def member_loss(self, outputs, target, loss, num_members, members, epoch, num_epochs, progress):
        self.noted.append((epoch, num_epochs, progress, members.tolist(), num_members))
        return loss(outputs, target) / num_members


class Weighted(Method):
    """Gives each member a weight of its own."""

    weights: tuple[float, ...] = (1.0, 2.0, 3.0)

    def separable(self):
        return True

    @hookimpl
    def member_loss(self, outputs, target, loss, members):
        weights = torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)
        return weights[members].unsqueeze(-1) * loss(outputs, target)


def test_a_hook_is_told_epoch_progress_and_members(tmp_path):
    Witness.noted.clear()
    spec = small_spec(method={"name": "witness"}, training=training(epochs=2))
    ek.train(spec, out=tmp_path / "run", progress=False, plugins=[Witness])
    steps = list(dict.fromkeys(note[:3] for note in Witness.noted if note[1] == 2))
    assert steps == [(1 + step // 4, 2, step / 8) for step in range(8)]
    assert {tuple(note[3]) for note in Witness.noted} == {(0, 1, 2)}


@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
def test_a_parameter_of_each_member_finds_its_member_on_every_engine(engine, tmp_path):
    results = []
    for name, method in {"own": {"name": "weighted"}, "plain": {"name": "independent"}}.items():
        spec = small_spec(method=method, engine={"name": engine, "device": "cpu"})
        spec["training"] = training(epochs=1, optimizer={"name": "sgd", "lr": 0.01})
        run = ek.train(spec, out=tmp_path / name, progress=False, plugins=[Weighted])
        results.append([member["loss"] for member in run.members])
    own, plain = results
    assert all(weighted < alone for weighted, alone in zip(own, plain, strict=True))  # 3, 6 and 9 times the gradient


class OneForEach(Method):
    """Has a parameter for each member, and sees all of them at once."""

    weights: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)

    @hookimpl
    def member_loss(self, outputs, target, loss):
        weights = torch.tensor(self.weights, dtype=outputs.dtype, device=outputs.device)
        return weights.unsqueeze(-1) * loss(outputs, target)


def test_the_choice_of_an_engine_measures_coupled_methods_with_all_members(tmp_path):
    spec = small_spec(method={"name": "one_for_each"}, ensemble={"members": 9}, training=training(epochs=1))
    spec["engine"] = {"name": "auto", "device": "cpu"}
    assert ek.train(spec, out=tmp_path / "run", progress=False, plugins=[OneForEach]).status == "finished"


def test_combine_is_told_loss_and_members():
    class Told(Method):
        """Averages probabilities."""

        @hookimpl
        def combine(self, outputs, loss, members):
            assert members.tolist() == [0, 1, 2]
            return loss.probabilities(outputs).mean(dim=0).log()

    outputs, target = torch.randn(3, 4, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    expected = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), target.repeat(3))
    assert torch.allclose(ek.objective(Told(), outputs, target), expected)
