"""Combiners against formulas in NumPy, and the part of a spec that names one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ensemblekit_combiners.median import Median
from ensemblekit_combiners.probabilities import Probabilities
from ensemblekit_combiners.vote import Vote
from ensemblekit_combiners.weighted import Weighted
from scipy.special import softmax
from torch import Tensor

import ensemblekit as ek
from ensemblekit.core.errors import SpecError
from ensemblekit.core.losses import MSE, NLL, CrossEntropy, Exponential, GaussianHinge
from ensemblekit.core.registry import discover
from ensemblekit.spec.overview import spec_overview
from ensemblekit.spec.reader import build_plugin, load_spec

SPEC = {
    "data": {"name": "digits"},
    "model": {"name": "mlp"},
    "method": {"name": "gncl"},
    "ensemble": {"members": 3},
}
CROSS_ENTROPY = CrossEntropy()


def draw(members: int = 4, samples: int = 30, classes: int = 5, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(members, samples, classes, generator=generator, dtype=torch.float64)


def problems(**changes) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        load_spec({**SPEC, **changes}, None, discover())
    return {problem.path: problem.what for problem in caught.value.problems}


@pytest.mark.parametrize("members", [1, 2, 4, 5])
def test_the_median_is_numpys(members):
    outputs = draw(members)
    np.testing.assert_array_equal(Median().combine(outputs).numpy(), np.median(outputs.numpy(), axis=0))


def test_the_probabilities_of_the_mixture_are_the_mean_of_the_members():
    outputs = draw()
    mixture = CROSS_ENTROPY.probabilities(Probabilities().combine(outputs, CROSS_ENTROPY))
    np.testing.assert_allclose(mixture.numpy(), softmax(outputs.numpy(), axis=-1).mean(axis=0))


@pytest.mark.parametrize("loss", [MSE(), NLL(), Exponential(), GaussianHinge()], ids=lambda loss: loss.name)
def test_the_mixture_has_the_mean_probabilities_for_every_loss(loss):
    outputs = draw(classes=1) if loss.takes == "margins" else draw().softmax(dim=-1)
    expected = loss.probabilities(outputs).mean(dim=0)
    torch.testing.assert_close(loss.probabilities(Probabilities().combine(outputs, loss)), expected)


def test_the_mixture_keeps_differences_that_are_too_small_for_probabilities():
    outputs = torch.tensor([[0.0, -300.0, -400.0]]).repeat(3, 1, 1)
    combined = Probabilities().combine(outputs, CROSS_ENTROPY)
    torch.testing.assert_close(combined - combined[..., :1], outputs[0])


def test_votes_are_counted_as_numpy_counts_them():
    outputs = draw(members=7).float()
    shares = CROSS_ENTROPY.probabilities(Vote().combine(outputs, CROSS_ENTROPY)).numpy()
    classes = outputs.numpy().argmax(axis=-1)
    expected = np.stack([np.bincount(column, minlength=5) for column in classes.T]) / 7
    np.testing.assert_allclose(shares, expected, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_two_classes_with_as_many_votes_the_more_probable_one_wins(dtype):
    # one vote for class 0 and one for class 1; the second member is surer, though its vote comes last
    outputs = torch.tensor([[[0.10, 0.0, -9.0]], [[0.0, 0.20, -9.0]]], dtype=dtype)
    assert Vote().combine(outputs, CROSS_ENTROPY).argmax(dim=-1).tolist() == [1]
    assert Vote().combine(outputs.flip(-1), CROSS_ENTROPY).argmax(dim=-1).tolist() == [1]
    more_votes_win = torch.cat([outputs, outputs[:1]])
    assert Vote().combine(more_votes_win, CROSS_ENTROPY).argmax(dim=-1).tolist() == [0]


def test_a_class_without_votes_never_wins_a_tie():
    # class 2 is the second choice of both members, and the most probable one on average
    outputs = torch.tensor([[0.40, 0.21, 0.39], [0.21, 0.40, 0.39]]).log().unsqueeze(1)
    assert int(Vote().combine(outputs, CROSS_ENTROPY).argmax()) in (0, 1)


def test_votes_with_margins_are_those_of_the_signs():
    outputs = torch.tensor([[[0.3]], [[0.2]], [[-5.0]]])
    assert float(Vote().combine(outputs, Exponential())) > 0 > float(outputs.mean())


def test_weights_are_those_of_stacking():
    outputs = draw()
    target = torch.arange(30) % 5
    stacking = ek.methods()["stacking"].load()()
    fitted = Weighted().fit_combiner(outputs, target, CROSS_ENTROPY)
    assert torch.equal(fitted, stacking.fit_combiner(outputs, target, CROSS_ENTROPY))
    assert torch.equal(Weighted().combine(outputs, fitted), stacking.combine(outputs, fitted))
    assert not torch.allclose(fitted, torch.full_like(fitted, 1 / 4))


@pytest.mark.parametrize("written", ["vote", {"name": "vote"}])
def test_a_spec_names_a_combiner_and_keeps_it(written):
    spec = load_spec({**SPEC, "ensemble": {"members": 3, "combiner": written}}, None, discover())
    assert spec.combiner == Vote().named("vote")
    assert spec.to_dict()["ensemble"]["combiner"] == "vote"
    assert load_spec(spec.to_dict(), None, discover()) == spec
    assert ("combiner", "vote") in spec_overview(spec)
    assert "ensemble.combiner" in dict(spec.plugins())


def test_without_a_combiner_nothing_is_written():
    spec = load_spec(SPEC, None, discover())
    assert spec.combiner is None
    assert "combiner" not in spec.to_dict()["ensemble"]
    assert "combiner" not in dict(spec_overview(spec))


@pytest.mark.parametrize("method", ["boosting", "stacking"])
def test_a_combiner_beside_a_method_that_combines_is_an_error_that_names_both(method):
    found = problems(method={"name": method}, ensemble={"members": 3, "combiner": "vote"})
    assert found == {
        "ensemble.combiner": f'"vote" combines the members\' outputs, but so does the method "{method}"',
    }


@pytest.mark.parametrize("name", ["vote", "probabilities"])
def test_combiners_of_classes_are_refused_for_regression(name):
    found = problems(data={"name": "diabetes"}, ensemble={"members": 3, "combiner": name})
    assert 'the task of "diabetes" is regression' in found["ensemble.combiner"]


@pytest.mark.parametrize("name", ["mean", "median", "weighted"])
def test_combiners_of_values_are_accepted_for_regression(name):
    tables = {**SPEC, "data": {"name": "diabetes"}, "ensemble": {"combiner": name}}
    assert load_spec(tables, None, discover()).combiner == build_plugin(ek.Combination, name, discover())


def test_an_unknown_combiner_is_an_error_with_the_nearest_name():
    assert '"vot" is not a registered combiner' in problems(ensemble={"combiner": "vot"})["ensemble.combiner.name"]


def test_fitted_weights_need_validation_data():
    found = problems(data={"name": "digits", "validation_fraction": 0}, ensemble={"combiner": "weighted"})
    assert "validation data" in found["data.validation_fraction"]
