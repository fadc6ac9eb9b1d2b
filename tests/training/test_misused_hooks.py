"""What a hook must not do ends the run with an error that names the hook, with every engine."""

from __future__ import annotations

import pytest
import torch
from helpers.small_runs import small_spec, training
from pydantic import Field

import ensemblekit as ek
from ensemblekit.core.errors import PluginError
from ensemblekit.members.build import build_member

ENGINES = ["sequential", "threaded", "stacked", "auto"]


def train(method: dict, plugin: type[ek.Method], path, engine: str, members: int = 3) -> ek.Run:
    spec = small_spec(
        method=method,
        model={"name": "mlp", "hidden": [8], "batch_norm": False},
        ensemble={"members": members},
        training=training(epochs=2),
        engine={"name": engine, "device": "cpu"},
    )
    return ek.train(spec, path, progress=False, plugins=[plugin])


class InPlace(ek.Method):
    """Changes the outputs in place."""

    formula = "none"
    hook: str = Field("member_loss", description="which hook")

    def separable(self):
        return False

    def _changed(self, hook, outputs):
        if hook == self.hook:
            outputs.mul_(2)

    @ek.hookimpl
    def combine(self, outputs):
        self._changed("combine", outputs)
        return outputs.mean(dim=0)

    @ek.hookimpl
    def member_loss(self, outputs, target, loss):
        self._changed("member_loss", outputs)
        return loss(outputs, target)

    @ek.hookimpl
    def ensemble_loss(self, outputs, combined, target, loss):
        self._changed("ensemble_loss", outputs)
        return loss(combined, target)

    @ek.hookimpl
    def select_members(self, outputs):
        self._changed("select_members", outputs)
        return


class SeparableInPlace(InPlace):
    """Changes the outputs of single members in place."""

    def separable(self):
        return True

    @ek.hookimpl
    def ensemble_loss(self):
        return None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hook", ["combine", "member_loss", "ensemble_loss", "select_members"])
def test_a_hook_that_changes_the_outputs_in_place_is_refused_by_every_engine(hook, engine, tmp_path):
    with pytest.raises(PluginError, match=f'"in_place".*"{hook}".* change.* outputs in place'):
        train({"name": "in_place", "hook": hook}, InPlace, tmp_path / "run", engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hook", ["combine", "member_loss", "select_members"])
def test_a_separable_hook_that_changes_the_outputs_in_place_is_refused_by_every_engine(hook, engine, tmp_path):
    with pytest.raises(PluginError, match=f'"separable_in_place".*"{hook}".* change.* outputs in place'):
        train({"name": "separable_in_place", "hook": hook}, SeparableInPlace, tmp_path / "run", engine)


class Backward(ek.Method):
    """Computes gradients itself."""

    formula = "none"

    @ek.hookimpl
    def member_loss(self, outputs, target, loss):
        losses = loss(outputs, target)
        losses.sum().backward()
        return losses


@pytest.mark.parametrize("engine", ENGINES)
def test_backward_in_a_hook_is_refused(engine, tmp_path):
    with pytest.raises(PluginError, match=r'"backward".*"member_loss".*backward\(\)'):
        train({"name": "backward"}, Backward, tmp_path / "run", engine)


class Freezes(ek.Method):
    """Freezes members at the start of an epoch."""

    formula = "(1/M) sum_i l(h_i, y)"
    members: tuple[int, ...] = Field((0,), description="which")
    at: int = Field(1, description="epoch")
    keeps: bool = Field(False, description="keep a copy instead")

    @ek.hookimpl
    def epoch_started(self, ensemble, epoch):
        for member in self.members if epoch == self.at else ():
            ensemble.keep_copy(member) if self.keeps else ensemble.freeze(member)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_member_that_is_frozen_at_the_start_keeps_its_weights(engine, tmp_path):
    run = train({"name": "freezes", "members": [1]}, Freezes, tmp_path / "run", engine)
    assert [row["frozen"] for row in run.members] == [False, True, False]
    start = build_member(run.spec.model, (1, 8, 8), 10, seed=0, member=1).state_dict()
    end = ek.load(run.path, plugins=[Freezes]).members[1].state_dict()
    assert [name for name in start if not torch.equal(start[name], end[name])] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_members_beside_a_frozen_one_learn_as_without_it(engine, tmp_path):
    run = train({"name": "freezes", "members": [1]}, Freezes, tmp_path / "run", engine)
    free = train({"name": "freezes", "members": []}, Freezes, tmp_path / "free", engine)
    first, second = (ek.load(each.path, plugins=[Freezes]).members for each in (run, free))
    for member, is_equal in ((0, True), (1, False), (2, True)):
        pairs = zip(first[member].parameters(), second[member].parameters(), strict=True)
        assert all(torch.allclose(left, right, atol=1e-6) for left, right in pairs) == is_equal


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("at", [1, 2])
def test_a_method_that_freezes_every_member_ends_with_an_error(at, engine, tmp_path):
    with pytest.raises(PluginError, match=f"every member is frozen.*epoch {at}"):
        train({"name": "freezes", "members": [0, 1, 2], "at": at}, Freezes, tmp_path / "run", engine)


@pytest.mark.parametrize("member", [99, 3, -1, -4])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_member_that_does_not_exist_cannot_be_frozen_or_copied(keeps, member, tmp_path):
    with pytest.raises(PluginError, match=rf"there is no member {member}.*\n?.*"):
        train({"name": "freezes", "members": [member], "keeps": keeps}, Freezes, tmp_path / "run", "sequential")
