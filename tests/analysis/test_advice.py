"""Advice on made-up outputs: given where the numbers support it, and not where they do not."""

from __future__ import annotations

import pytest
import torch
from helpers.kept_runs import Outputs, kept, kept_run

from ensemblekit.analysis import advice as rules
from ensemblekit.analysis.advice import Evidence, advice, best_group_advice
from ensemblekit.analysis.comparison import compare_facts
from ensemblekit.analysis.reading import _read

CALIBRATED = Outputs(signal=1.0, common_noise=1.0, member_noise=0.0, num_members=1)
"""The logits of two Gaussians with a distance of 1 and a variance of 1: the softmax is the true probability."""
STRONG = Outputs(signal=8.0)


def given(rule, run):
    return rule(Evidence.of(run))


def test_members_with_a_high_training_loss_under_fit():
    weak = kept_run(Outputs(signal=0.5), history={"train_loss": 1.2})  # a guess has log 5 = 1.61
    found = given(rules.underfitting, weak)
    assert found.figures["guess_loss"] == pytest.approx(torch.tensor(5.0).log().item())
    assert "larger λ than 0.5" in found.text
    assert "Buschjäger" in found.source
    assert "20 %" in found.rule


def test_members_with_a_low_training_loss_or_a_low_test_loss_do_not():
    assert given(rules.underfitting, kept_run(Outputs(signal=0.5), history={"train_loss": 0.1})) is None
    assert given(rules.underfitting, kept_run(STRONG, history={"train_loss": 1.2})) is None
    assert given(rules.underfitting, kept_run(Outputs(signal=0.5), history={"train_loss": None})) is None


def test_an_ensemble_that_is_trained_end_to_end_is_not_told_to_be():
    run = kept_run(Outputs(signal=0.5), overrides={"method.lambda": 1.0}, history={"train_loss": 1.2})
    assert "λ" not in given(rules.underfitting, run).text


def test_the_guess_of_regression_is_the_mean_of_the_targets():
    targets = torch.randn(500, 1, generator=torch.Generator().manual_seed(0))
    overrides = {"data": "diabetes", "training.loss": "mse"}
    run = kept_run(kept(torch.zeros(3, 500, 1), targets), overrides=overrides, history={"train_loss": 0.45})
    found = given(rules.underfitting, run)
    assert found.figures["guess_loss"] == pytest.approx(0.5 * float(targets.var(correction=0)), rel=1e-3)
    close = kept_run(kept(targets + torch.zeros(3, 500, 1), targets), overrides=overrides, history={"train_loss": 0.01})
    assert given(rules.underfitting, close) is None


def validation(member_noise):
    return Outputs(num_samples=400, member_noise=member_noise, seed=5).kept()


def test_members_that_differ_only_on_training_data_collude():
    diversity = float(rules.sample_quantities(validation(1.0), kept_run(STRONG).combiner())["diversity"].mean())
    run = kept_run(STRONG, validation=validation(1.0), history={"train_diversity": 3 * diversity})
    found = given(rules.collusion, run)
    assert found.figures["validation_diversity_low"] < diversity < found.figures["validation_diversity_high"]
    assert "lower λ than 0.5" in found.text
    assert "Jeffares" in found.source


def test_members_that_differ_as_much_on_validation_data_do_not():
    diversity = float(rules.sample_quantities(validation(1.0), kept_run(STRONG).combiner())["diversity"].mean())
    for train_diversity in (diversity, 1.4 * diversity, None):
        run = kept_run(STRONG, validation=validation(1.0), history={"train_diversity": train_diversity})
        assert given(rules.collusion, run) is None
    assert given(rules.collusion, kept_run(STRONG, history={"train_diversity": 9.0})) is None  # no validation data


def test_copies_of_one_member_are_superfluous():
    one = Outputs(num_members=1).kept()
    found = given(rules.superfluous_members, kept_run(kept(one.outputs.expand(6, -1, -1).clone(), one.targets)))
    assert found.figures["sufficient_members"] == 1
    assert found.text.startswith("1 of 6 members suffice: the last 5 improve the accuracy by at most 0.00 points")


def test_members_that_all_help_are_not():
    noisy = Outputs(num_members=4, common_noise=0.3, member_noise=4.0)
    assert given(rules.superfluous_members, kept_run(noisy)) is None


def test_many_members_are_more_than_enough():
    crowd = Outputs(num_members=24, member_noise=0.6, num_samples=4000)
    found = given(rules.superfluous_members, kept_run(crowd))
    assert 2 <= found.figures["sufficient_members"] <= 20
    assert found.figures["loss_gain_high"] <= 0.01
    assert found.figures["accuracy_gain_high"] <= 0.005


def test_too_few_samples_to_know_how_many_members_are_needed_give_no_advice():
    assert given(rules.superfluous_members, kept_run(Outputs(num_members=4, member_noise=2.0, num_samples=25))) is None


def test_members_that_cannot_be_left_out_give_no_advice():
    assert given(rules.superfluous_members, kept_run(Outputs(num_members=1))) is None
    passes = kept_run(Outputs(num_members=6), overrides={"ensemble.members": 3})  # two passes of three networks
    assert given(rules.superfluous_members, passes) is None


def test_probabilities_that_are_too_high_are_over_confident():
    run = kept_run(CALIBRATED.but(scale=2.5, num_members=2))
    found = given(rules.overconfidence, run)
    assert found.figures["confidence_minus_accuracy_low"] > 0.01
    assert found.figures["confidence"] > found.figures["accuracy"]
    assert "Guo" in found.source


def test_true_and_too_low_probabilities_are_not():
    assert given(rules.overconfidence, kept_run(CALIBRATED.but(num_samples=8000))) is None
    assert given(rules.overconfidence, kept_run(CALIBRATED.but(scale=0.3))) is None


def test_the_command_is_named_only_if_there_is_one(monkeypatch):
    run = kept_run(CALIBRATED.but(scale=2.5), "runs/mine")
    monkeypatch.setattr("ensemblekit.__all__", ["train"])
    assert "temperature scaling" in given(rules.overconfidence, run).text
    monkeypatch.setattr("ensemblekit.__all__", ["train", "calibrate"])
    assert given(rules.overconfidence, run).text.endswith("ensemblekit calibrate runs/mine")


def test_a_good_run_gets_no_advice_and_several_runs_need_a_majority():
    good = kept_run(CALIBRATED.but(num_samples=8000))
    assert advice(good) == []
    bad = kept_run(CALIBRATED.but(scale=2.5))
    assert [found.source for found in advice([bad, bad, good])] == [rules.GUO]
    assert advice([bad, bad, good])[0].figures["runs_with_this_advice"] == 2
    assert advice([bad, good, good]) == []


def test_the_best_group_is_named_only_if_the_interval_supports_it():
    runs = [kept_run(Outputs(signal=signal), f"r{signal}", {"method.lambda": signal / 8}) for signal in (2.0, 3.0)]
    (found,) = best_group_advice(compare_facts([_read(run)[0] for run in runs]))
    assert found.text.startswith("lambda=0.375 is the best of 2: its accuracy is")
    assert 0 < found.figures["difference_low"] < found.figures["difference"] < found.figures["difference_high"]
    same = [kept_run(Outputs(seed=seed), f"s{seed}", {"method.lambda": seed / 10}) for seed in (1, 2)]
    assert best_group_advice(compare_facts([_read(run)[0] for run in same])) == []
    assert best_group_advice(compare_facts([_read(runs[0])[0]])) == []
