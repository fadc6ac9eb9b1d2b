"""A loss is checked against the data as soon as its form is known, at the latest when it is loaded."""

from __future__ import annotations

import pytest
import torch
from helpers.commands import last_error, run

import ensemblekit as ek
from ensemblekit.core.errors import SpecError

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
THREE_CLASSES = torch.arange(60) % 3
REAL = INPUTS[:, 0]


def spec(loss: str, **changes: object) -> dict:
    training = {"epochs": 2, "batch_size": 20, "loss": loss, "optimizer": {"name": "adam", "lr": 0.01}}
    model = {"name": "mlp", "hidden": [8]}
    return {"data": "given", "model": model, "ensemble": {"members": 2}, "training": training, **changes}


@pytest.mark.parametrize("loss", ["exponential", "gaussian_hinge"])
def test_a_loss_for_two_classes_is_refused_for_three_that_are_known_only_after_loading(loss, tmp_path):
    data = (INPUTS, THREE_CLASSES)
    with pytest.raises(SpecError, match=f'"{loss}" is a loss for two classes, but "given" has 3') as error:
        ek.train(spec(loss), tmp_path / "run", progress=False, data=(data, data))
    assert error.value.exit_code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("loss", ["exponential", "gaussian_hinge", "cross_entropy"])
def test_a_loss_for_classes_is_refused_for_real_targets_that_are_known_only_after_loading(loss, tmp_path):
    with pytest.raises(SpecError, match=f'"{loss}" is a loss for classes, but the task of "given" is regression'):
        ek.train(spec(loss), tmp_path / "run", progress=False, data=((INPUTS, REAL), (INPUTS, REAL)))


@pytest.mark.parametrize(
    ("loss", "task", "target", "expected"),
    [
        ("exponential", "classification", "abc", "is a loss for two classes"),
        ("gaussian_hinge", "classification", "abc", "is a loss for two classes"),
        ("exponential", "regression", torch.linspace(-1, 1, 60).tolist(), "regression"),
    ],
)
def test_a_table_that_does_not_fit_the_loss_is_refused_before_training(loss, task, target, expected, tmp_path):
    rows = "".join(f"{index},{index % 7},{target[index % len(target)]}\n" for index in range(60))
    (tmp_path / "own.csv").write_text("first,second,answer\n" + rows)
    own = f'{{name = "table", path = "{tmp_path / "own.csv"}", target = "answer", task = "{task}"}}'
    settings = ["--set", f"data={own}", "--set", "model=mlp", "--set", f"training.loss={loss}"]
    result = run("train", "digits", *settings, "--out", str(tmp_path / "run"), "--quiet")
    assert result.exit_code == 2
    assert expected in last_error(result)
    assert not (tmp_path / "run").exists()


def test_the_other_plugins_are_checked_against_the_loaded_data_too(tmp_path):
    data = ((INPUTS, REAL), (INPUTS, REAL))
    for method, path in (("divloss", "method.lambda2"), ("diversity_cooperation", "method.name")):
        with pytest.raises(SpecError) as error:
            ek.train(spec("mse", method=method), tmp_path / "run", progress=False, data=data)
        assert [problem.path for problem in error.value.problems] == [path]


@pytest.mark.parametrize("engine", ["sequential", "threaded", "stacked"])
def test_networks_with_a_softmax_train_on_the_likelihood_of_their_mean_probability(engine, tmp_path):
    changes = {"model": {"name": "mlp", "hidden": [8], "softmax": True}, "engine": {"name": engine, "device": "cpu"}}
    data = (INPUTS, (INPUTS[:, 0] > 0).long())
    done = ek.train(spec("nll", method="end_to_end", **changes), tmp_path / "run", progress=False, data=(data, data))
    outputs = done.ensemble.member_outputs(INPUTS)
    torch.testing.assert_close(outputs.sum(-1), torch.ones(2, 60))
    likelihood = outputs.mean(0)[torch.arange(60), data[1]]
    assert done.metrics["test_nll"] == pytest.approx(-likelihood.log().mean().item(), rel=1e-5)
    assert done.metrics["test_loss"] == pytest.approx(done.metrics["test_nll"], rel=1e-5)
    assert done.metrics["test_entropy"] == pytest.approx(done.metrics["test_prediction_entropy"])


@pytest.mark.parametrize("method", ["boosting", "stacking", {"name": "smcl", "combine": "max"}])
def test_the_decomposition_of_a_run_closes_for_the_mean_output_whatever_combines_the_outputs(method, tmp_path):
    data = (INPUTS, THREE_CLASSES)
    table = spec("cross_entropy", method=method)
    metrics = ek.train(table, tmp_path / "run", progress=False, data=(data, data)).metrics
    total = metrics["test_mean_member_loss"] - metrics["test_diversity"] + metrics["test_remainder"]
    assert metrics["test_mean_output_loss"] == pytest.approx(total, abs=1e-5)
    assert metrics["test_mean_output_loss"] != pytest.approx(metrics["test_loss"], abs=1e-5)
    assert metrics["test_remainder_bound"] >= abs(metrics["test_remainder"])


@pytest.mark.parametrize("loss", ["exponential", "gaussian_hinge"])
def test_signs_as_targets_train_as_the_classes_0_and_1_do(loss, tmp_path):
    positive = INPUTS[:, 0] > 0
    metrics = {}
    for name, target in {"signs": torch.where(positive, 1, -1), "indices": positive.long()}.items():
        data = ((INPUTS, target), (INPUTS, target))
        metrics[name] = ek.train(spec(loss), tmp_path / name, progress=False, data=data).metrics
    assert metrics["signs"] == metrics["indices"]
