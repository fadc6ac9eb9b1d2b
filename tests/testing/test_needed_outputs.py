"""Methods that need more than the members' predictions are checked with what they declare, and refused without it."""

from __future__ import annotations

import pytest
import torch

import ensemblekit as ek
from ensemblekit import Loss, Method, hookimpl
from ensemblekit.testing import contract


class Gated(Method):
    """Weights members by a gate."""

    formula = "l(sum_i g_i h_i, y)"

    def required_groups(self):
        return {"gate": "members"}

    @hookimpl
    def combine(self, outputs, auxiliary):
        return torch.einsum("bm,mbc->bc", auxiliary["gate"][0].softmax(dim=-1), outputs)

    @hookimpl
    def ensemble_loss(self, combined, target, loss):
        return loss(combined, target)


class NotDeclared(Gated):
    """Weights members by a gate that it does not declare."""

    def required_groups(self):
        return {}


class WrongForOneMember(Gated):
    """Is only right for three members."""

    @hookimpl
    def ensemble_loss(self, combined, target, loss, num_members):
        return loss(combined, target) / (num_members - 1)


class Spread(Method):
    """Penalises large features."""

    formula = "(1/M) sum_i [l(h_i, y) + ||features_i||^2]"

    def required_outputs(self):
        return ("features",)

    @hookimpl
    def ensemble_loss(self, named):
        return named["features"].square().mean(dim=(0, 2))


class Scaled(Loss):
    """The squared error of values whose scale is an output, too."""

    formula = "l = (y - m)^2 + s^2"
    takes = "values"

    def num_outputs(self, info):
        return 2 * info.num_outputs

    def slices(self, num_outputs):
        return {"value": num_outputs // 2, "scale": num_outputs // 2}

    def prepare(self, outputs, target):
        return target.reshape(len(target), -1).to(outputs.dtype)

    def per_sample(self, outputs, target):
        value, scale = outputs.chunk(2, dim=-1)
        return ((target - value).square() + scale.square()).sum(dim=-1)

    def point(self, outputs):
        return outputs.chunk(2, dim=-1)[0]


class OfScales(Method):
    """Takes the largest scale."""

    formula = "mean of the values, largest scale"

    def required_outputs(self):
        return ("value", "scale")

    @hookimpl
    def combine(self, named):
        return torch.cat([named["value"].mean(dim=0), named["scale"].amax(dim=0)], dim=-1)


def failures(plugin):
    return {str(one): result.message for one in contract(plugin) if not (result := one.result()).passed}


@pytest.mark.parametrize("method", [Gated, Spread, OfScales])
def test_a_method_passes_with_the_groups_outputs_and_losses_that_it_needs(method):
    assert failures(method()) == {}


def test_a_gate_that_is_not_declared_is_named_with_what_to_declare():
    found = "\n".join(failures(NotDeclared()).values())
    assert 'uses auxiliary outputs called "gate"' in found
    assert "let required_groups() of the method return the name" in found


def test_a_method_with_a_gate_is_also_tried_with_one_member():
    assert "it works with one member" in failures(WrongForOneMember())


def test_a_run_without_what_a_method_needs_is_refused_before_training(tmp_path):
    spec = {"data": "digits", "model": "mlp", "ensemble": {"members": 2}, "method": ["gated", "spread"]}
    with pytest.raises(ek.EnsemblekitError) as error:
        ek.train(spec, tmp_path / "run", progress=False, plugins=[Gated, Spread])
    assert 'needs an auxiliary group "gate" with 2 outputs, and there is none' in str(error.value)
    assert 'needs outputs called "features"' in str(error.value)
    assert not (tmp_path / "run").exists()
