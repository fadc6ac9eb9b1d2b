"""Anytime prediction: answers are those of all members, or differ with at most the stated risk."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ensemblekit as ek
from ensemblekit.core.errors import NumericError
from ensemblekit.core.objective import Objective
from ensemblekit.inference.anytime import _fitted_limit, _steps
from ensemblekit.inference.combining import Combiner
from ensemblekit.runs.outputs import KeptOutputs

BASE: dict[str, Any] = {
    "data": {"name": "digits", "limit_train": 500, "validation_fraction": 0.4},
    "model": {"name": "mlp", "hidden": [16]},
    "ensemble": {"members": 6},
    "training": {"epochs": 8, "batch_size": 50, "optimizer": {"lr": 0.03}},
    "engine": {"name": "stacked", "device": "cpu"},
}
NUM_MEMBERS = 6


def train(path: Path, **changes: Any) -> Path:
    return ek.train({**BASE, **changes}, out=path, progress=False).path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """One trained run, whose members are combined in three ways."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "mean")
    for combiner in ("probabilities", "vote"):
        ek.select(folder / "mean", members=NUM_MEMBERS, combiner=combiner, out=folder / combiner)
    return folder


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.cat([batch.inputs for batch in ek.load_data(ek.load_spec(BASE).data, 0).test.batches(100)])


def asked_by_hand(contributions: torch.Tensor) -> torch.Tensor:
    """How many of the members' contributions (M, B, C), each at most 1, fix the class with the largest sum."""
    asked = torch.full((contributions.shape[1],), len(contributions))
    for sample in range(contributions.shape[1]):
        for count in range(1, len(contributions)):
            sums = sorted(contributions[:count, sample].double().sum(dim=0).tolist(), reverse=True)
            if sums[0] - sums[1] > len(contributions) - count + 1e-3:
                asked[sample] = count
                break
    return asked


@pytest.mark.parametrize("combiner", ["probabilities", "vote"])
def test_exact_answers_are_those_of_all_members_with_as_few_as_the_bound_allows(runs, x, combiner):
    ensemble = ek.load(runs / combiner)
    found = ensemble.anytime()(x)
    assert torch.equal(found.probabilities.argmax(dim=-1), ensemble.predict_proba(x).argmax(dim=-1))
    ordered = ensemble.member_outputs(x)[list(ensemble.anytime().order)].softmax(dim=-1)
    votes = torch.nn.functional.one_hot(ordered.argmax(dim=-1), 10).float()
    assert torch.equal(found.asked, asked_by_hand(ordered if combiner == "probabilities" else votes))
    assert found.share_saved == pytest.approx(1 - found.asked.float().mean().item() / NUM_MEMBERS)
    assert found.share_saved > 0.15


@pytest.mark.parametrize("combiner", ["probabilities", "vote"])
def test_no_outputs_of_the_members_that_were_not_asked_could_change_an_exact_answer(runs, x, combiner):
    ensemble = ek.load(runs / combiner)
    found, answer = ensemble.anytime()(x), ensemble.predict_proba(x).argmax(dim=-1)
    for other in range(10):
        contradicting = torch.full((10,), -50.0)
        contradicting[other] = 50.0
        outputs = torch.where(found.outputs.isnan(), contradicting, found.outputs)
        assert torch.equal(ensemble.combiner.probabilities(outputs).argmax(dim=-1), answer)


def test_probabilities_are_those_of_the_members_that_were_asked(runs, x):
    ensemble = ek.load(runs / "probabilities")
    found = ensemble.anytime()(x)
    probabilities = ensemble.predict_proba(x, stop_when_sure=True)
    assert torch.equal(probabilities, found.probabilities)
    members = found.outputs.softmax(dim=-1)
    for sample in range(0, len(x), 25):
        expected = members[: int(found.asked[sample]), sample].mean(dim=0)
        assert probabilities[sample].allclose(expected, atol=1e-5)
        assert bool(found.outputs[int(found.asked[sample]) :, sample].isnan().all())


def test_only_samples_without_a_final_answer_are_computed_by_the_next_member(runs, x, monkeypatch):
    ensemble, sizes = ek.load(runs / "vote"), []
    compute = ensemble.network_outputs

    def spy(inputs, enable_grad=False, networks=None):
        sizes.append((len(inputs), networks))
        return compute(inputs, enable_grad, networks)

    monkeypatch.setattr(ensemble, "network_outputs", spy)
    found = ensemble.anytime()(x)
    order = ensemble.anytime().order
    assert sizes == [
        (int((found.asked >= count).sum()), [member]) for count, member in enumerate(order, 1) if sizes[count - 1 :]
    ]
    assert sum(size for size, _ in sizes) == int(found.asked.sum())


def test_members_are_asked_in_the_order_of_greedy_selection_else_in_their_own(runs, tmp_path):
    shutil.copytree(runs / "probabilities", tmp_path / "run")
    kept = ek.open_run(runs / "probabilities").outputs("validation")
    log_probabilities, order = kept.outputs.double().log_softmax(dim=-1), []
    for _ in range(NUM_MEMBERS):
        left = [member for member in range(NUM_MEMBERS) if member not in order]
        losses = [
            float(-log_probabilities[[*order, member]].exp().mean(0)[range(len(kept)), kept.targets].log().mean())
            for member in left
        ]
        order.append(left[losses.index(min(losses))])
    assert ek.load(tmp_path / "run").anytime().order == tuple(order)
    moved = ek.load(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert moved.anytime().order == tuple(range(NUM_MEMBERS))
    with pytest.raises(ek.UsageError, match="kept no validation outputs"):
        moved.anytime(0.1)


@pytest.mark.parametrize("combiner", ["mean", "probabilities", "vote"])
def test_a_risk_saves_more_and_changes_few_answers(runs, x, combiner):
    ensemble = ek.load(runs / combiner)
    found, full = ensemble.anytime(0.02)(x), ensemble.predict_proba(x).argmax(dim=-1)
    assert found.share_saved > (0.3 if combiner == "mean" else ensemble.anytime()(x).share_saved)
    changed = (found.probabilities.argmax(dim=-1) != full).double().mean()
    assert changed <= 0.02 + 3 * math.sqrt(0.02 * 0.98 / 577)  # fitted to 577 validation samples


def synthetic(num_samples: int, seed: int) -> tuple[Combiner, KeptOutputs]:
    """Outputs (M, N, C) of noisy members that share a signal, and their plain mean."""
    spec = ek.load_spec({**BASE, "training": {"loss": "cross_entropy"}})
    random = torch.Generator().manual_seed(seed)
    targets = torch.randint(4, (num_samples,), generator=random)
    signal = 1.5 * torch.nn.functional.one_hot(targets, 4) + torch.randn(num_samples, 4, generator=random)
    outputs = signal + 1.5 * torch.randn(NUM_MEMBERS, num_samples, 4, generator=random)
    kept = KeptOutputs(outputs, targets, torch.arange(num_samples))
    return Combiner(Objective((), spec.loss), NUM_MEMBERS), kept


def changed_at(combiner: Combiner, outputs: torch.Tensor, limit: float) -> torch.Tensor:
    """Whether the answer for each sample differs from that of all members; one sample and one step at a time."""
    order = range(NUM_MEMBERS)
    steps = [(sure.tolist(), answer.tolist()) for sure, answer in _steps(combiner, outputs, order)]
    changed = []
    for sample in range(outputs.shape[1]):
        answer = next(answers[sample] for sureness, answers in steps if sureness[sample] > limit)
        changed.append(answer != steps[-1][1][sample])
    return torch.tensor(changed)


def test_the_expected_share_of_changed_answers_is_at_most_the_risk():
    combiner, kept = synthetic(4000, seed=0)
    risk, shares = 0.05, []
    for seed in range(40):
        chosen = torch.randperm(len(kept), generator=torch.Generator().manual_seed(seed))
        fitted, rest = chosen[:100], chosen[100:600]
        sample = KeptOutputs(kept.outputs[:, fitted], kept.targets[fitted], kept.index[fitted])
        limit = _fitted_limit(combiner, sample, range(NUM_MEMBERS), risk)
        shares.append(changed_at(combiner, kept.outputs[:, rest], limit).double().mean())
    shares_of = torch.stack(shares)
    assert shares_of.mean() <= risk + 3 * shares_of.std() / math.sqrt(len(shares))
    assert shares_of.mean() > 0.4 * risk  # and not far below it, which would save little


def test_the_limit_is_the_lowest_that_leaves_few_enough_changes_at_it_and_above():
    combiner, kept = synthetic(99, seed=1)
    risk = 0.1  # (changed + 1) / 100 ≤ 0.1: at most 9
    limit = _fitted_limit(combiner, kept, range(NUM_MEMBERS), risk)
    limits = sorted(
        {value for sure, _ in _steps(combiner, kept.outputs, range(NUM_MEMBERS)) for value in sure.tolist()}
    )
    finite = [value for value in limits if math.isfinite(value)]
    # a sample counts at a limit if it is changed there or at any higher limit
    ever, counts = torch.zeros(len(kept), dtype=torch.bool), {}
    for value in reversed(finite):
        ever |= changed_at(combiner, kept.outputs, value)
        counts[value] = int(ever.sum())
    assert limit == min(value for value, count in counts.items() if count <= 9)


def test_a_copied_ensemble_still_stops_when_sure(runs, x):
    ensemble = ek.load(runs / "vote")
    expected = ensemble.predict_proba(x, stop_when_sure=True)
    assert torch.equal(copy.deepcopy(ensemble).predict_proba(x, stop_when_sure=True), expected)


@pytest.mark.parametrize(
    ("risk", "message"),
    [
        (None, "outputs have no bound"),
        (0.001, "needs at least 999 validation samples, and the run has 577"),
        (0.0, "the risk is 0"),
        (1.5, "the risk is 1.5"),
    ],
)
def test_a_mean_of_outputs_without_a_bound_and_impossible_risks_are_refused(runs, x, risk, message):
    with pytest.raises(ek.UsageError, match=message) as caught:
        ek.load(runs / "mean").predict_proba(x, stop_when_sure=True, risk=risk)
    assert caught.value.fix


def test_a_risk_without_stopping_is_refused(runs, x):
    with pytest.raises(ek.UsageError, match="stop early"):
        ek.load(runs / "mean").predict_proba(x, risk=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"name": "diabetes"}}, "never sure|no class probabilities"),
        ({"method": "stacking"}, "only defined for all members"),
        ({"model": {"name": "tabm", "hidden": [8]}}, "one network computes several members"),
        ({"model": {"name": "mlp", "dropout": 0.2}, "method": {"name": "dropout", "passes": 2}}, "one network"),
    ],
)
def test_ensembles_whose_members_cannot_be_asked_one_by_one_are_refused(tmp_path, changes, message):
    train(tmp_path / "run", **{"training": {"epochs": 1}, "ensemble": {"members": 2}, **changes})
    with pytest.raises(ek.UsageError, match=message):
        ek.load(tmp_path / "run").anytime(0.1)


def test_outputs_that_are_not_finite_are_named_by_their_input(runs, x):
    ensemble = ek.load(runs / "vote")
    bad = x.clone()
    bad[3] = math.nan
    with pytest.raises(NumericError, match="not finite"):
        ensemble.predict_proba(bad, stop_when_sure=True)
