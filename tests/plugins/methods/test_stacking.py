"""Stacking: its weights against scipy's optimisers and closed forms, and a run that fits, saves and uses them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.places import ROOT
from safetensors.torch import load_file
from scipy import optimize
from torch import Tensor

import ensemblekit as ek
from ensemblekit.core.errors import SpecError
from ensemblekit.core.objective import Objective
from ensemblekit.spec.reader import build_plugin

M, N, C = 4, 60, 3


def draw(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Members of different quality on held-out data: outputs (M, N, C) and classes (N,)."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(C, (N,), generator=generator)
    signal = torch.nn.functional.one_hot(target, C).double()
    noise = torch.randn(M, N, C, generator=generator, dtype=torch.float64)
    return signal + torch.tensor([0.5, 1.0, 1.5, 4.0], dtype=torch.float64).view(M, 1, 1) * noise, target


def objective(loss: str, **parameters) -> Objective:
    from ensemblekit.core.registry import discover

    return Objective([ek.methods()["stacking"].load()(**parameters)], build_plugin(ek.Loss, loss, discover()))


def fit(stacking: Objective, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return stacking.fit_combiner(outputs, target)


def numpy_cross_entropy(logits: np.ndarray, target: np.ndarray) -> float:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(target)), target]))


@pytest.mark.parametrize("seed", range(3))
def test_weights_for_the_squared_error_are_those_of_nonnegative_least_squares(seed):
    outputs, target = draw(seed)
    fitted = fit(objective("mse"), outputs, target)
    matrix = outputs.permute(1, 2, 0).reshape(-1, M).numpy()
    truth = torch.nn.functional.one_hot(target, C).reshape(-1).double().numpy()
    heavy = 1e5  # a row that lets the weights sum to one
    expected, _ = optimize.nnls(np.vstack([matrix, np.full((1, M), heavy)]), np.append(truth, heavy))
    assert fitted.shape == (M, 1)
    np.testing.assert_allclose(fitted.squeeze(1).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_weights_for_cross_entropy_are_those_of_a_constrained_optimiser(seed):
    outputs, target = draw(seed)
    fitted = fit(objective("cross_entropy"), outputs, target).squeeze(1).numpy()
    h, y = outputs.numpy(), target.numpy()
    found = optimize.minimize(
        lambda w: numpy_cross_entropy(np.tensordot(w, h, 1), y),
        np.full(M, 1 / M),
        method="SLSQP",
        bounds=[(0, None)] * M,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    np.testing.assert_allclose(fitted, found.x, atol=1e-4)
    assert fitted.min() >= 0
    assert fitted.sum() == pytest.approx(1, abs=1e-12)


def test_members_that_only_harm_get_a_weight_of_zero():
    outputs, target = draw()
    outputs[3] = -outputs[0]
    assert fit(objective("cross_entropy"), outputs, target)[3] < 1e-8


def test_linear_weights_for_the_squared_error_have_a_closed_form():
    outputs, target = draw()
    penalty = 0.3
    fitted = fit(objective("mse", form="linear", penalty=penalty), outputs, target)
    truth = torch.nn.functional.one_hot(target, C).double()
    for c in range(C):
        h = outputs[:, :, c].T
        left = h.T @ h / N + penalty * torch.eye(M, dtype=torch.float64)
        right = h.T @ truth[:, c] / N + penalty / M
        torch.testing.assert_close(fitted[:, c], torch.linalg.solve(left, right), rtol=0, atol=1e-6)


def test_linear_weights_for_cross_entropy_are_those_of_another_optimiser():
    outputs, target = draw()
    fitted = fit(objective("cross_entropy", form="linear", penalty=0.05), outputs, target).numpy()
    h, y = outputs.numpy(), target.numpy()

    def paid(flat: np.ndarray) -> float:
        w = flat.reshape(M, C)
        return numpy_cross_entropy((h * w[:, None]).sum(axis=0), y) + 0.025 * np.square(w - 1 / M).sum()

    found = optimize.minimize(paid, np.full(M * C, 1 / M), method="BFGS", options={"gtol": 1e-7})
    np.testing.assert_allclose(fitted.reshape(-1), found.x, atol=1e-4)


@pytest.mark.parametrize("form", ["weights", "linear"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("seed", range(5))
def test_stacking_is_never_worse_than_the_mean_on_the_data_it_is_fitted_to(seed, loss, form):
    outputs, target = draw(seed)
    stacked = objective(loss, form=form)
    fitted = fit(stacked, outputs, target)
    paid = stacked.loss(stacked.combine(outputs, fitted), target).mean()
    assert paid <= stacked.loss(outputs.mean(dim=0), target).mean()


def test_weights_are_fitted_in_float64_and_come_back_in_the_dtype_of_the_outputs():
    outputs, target = draw()
    exact = fit(objective("cross_entropy"), outputs, target)
    rough = fit(objective("cross_entropy"), outputs.float(), target)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough.double(), exact, rtol=0, atol=1e-5)


def test_without_a_fit_stacking_combines_as_the_methods_before_it_do():
    outputs, _ = draw()
    assert torch.equal(objective("mse").combine(outputs), outputs.mean(dim=0))
    boosting, stacking = (ek.methods()[name].load()() for name in ("boosting", "stacking"))
    assert torch.equal(Objective([boosting, stacking], ek.MSE()).combine(outputs), outputs.sum(dim=0))


def digits(changes: dict) -> ek.Spec:
    overrides = {
        "method": "stacking",
        "data.limit_train": 300,
        "data.validation_fraction": 0.2,
        "ensemble.members": 4,
        "training.epochs": 12,
        "engine.name": "stacked",
    }
    return ek.load_spec(ROOT / "specs" / "digits.toml", overrides={**overrides, **changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, ek.Run]:
    """The same members, combined by their mean and by fitted weights."""
    folder = tmp_path_factory.mktemp("runs")
    linear = {"name": "stacking", "form": "linear", "penalty": 0.01}
    methods = {"mean": "gncl", "weights": ["gncl", "stacking"], "linear": ["gncl", linear]}
    specs = {name: digits({"method": method}) for name, method in methods.items()}
    return {name: ek.train(spec, folder / name, progress=False) for name, spec in specs.items()}


def test_stacking_leaves_the_training_of_the_members_alone(runs):
    mean, stacked = (load_file(runs[name].path / "model.safetensors") for name in ("mean", "weights"))
    assert stacked.keys() - mean.keys() == {"combiner"}
    assert all(torch.equal(mean[name], stacked[name]) for name in mean)
    for name in ("train_loss", "train_accuracy"):
        assert [row[name] for row in runs["mean"].history] == [row[name] for row in runs["weights"].history]


@pytest.mark.parametrize("form", ["weights", "linear"])
def test_every_evaluation_uses_weights_fitted_to_the_validation_data(runs, form):
    for plain, stacked in zip(runs["mean"].history, runs[form].history, strict=True):
        assert stacked["validation_loss"] <= plain["validation_loss"]
        assert stacked["test_loss"] != plain["test_loss"]
        assert stacked["test_mean_member_accuracy"] == plain["test_mean_member_accuracy"]
    assert runs[form].metrics["test_loss"] < runs["mean"].metrics["test_loss"]


@pytest.mark.parametrize("form", ["weights", "linear"])
def test_a_loaded_ensemble_combines_by_the_weights_of_the_run(runs, form, tmp_path):
    run = runs[form]
    ensemble = ek.load(run.path)
    weights = load_file(run.path / "model.safetensors")["combiner"]
    inputs = torch.rand(7, 1, 8, 8)
    outputs = ensemble.member_outputs(inputs)
    expected = sum(weights[member] * outputs[member] for member in range(4))
    torch.testing.assert_close(ensemble(inputs), expected)
    assert torch.equal(ensemble(inputs), run.ensemble(inputs))
    assert ek.evaluate_run(run.path) == pytest.approx(run.metrics, rel=1e-4)
    double = ensemble.double()
    assert double(inputs.double()).dtype == torch.float64


def test_the_weights_belong_to_the_epoch_that_is_kept(tmp_path):
    optimizer = {"name": "adam", "lr": 0.1}
    changes = {"training.keep": "best", "training.optimizer": optimizer, "training.schedule": "constant"}
    run = ek.train(digits(changes), tmp_path / "run", progress=False)
    losses = [row["validation_loss"] for row in run.history]
    best = run.history[losses.index(min(losses))]
    assert best["epoch"] < len(losses)
    assert run.metrics["test_loss"] == pytest.approx(best["test_loss"])
    assert ek.evaluate_run(run.path) == pytest.approx(run.metrics, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.validation_fraction": 0},
            r"data\.validation_fraction: 0, but \"stacking\" fits the weights of the members to validation data",
        ),
        (
            {"method": {"name": "stacking", "form": "linear"}, "training.loss": "nll"},
            r"(?s)method\.form: .*needs them.*set form",
        ),
        ({"method": {"name": "stacking", "penalty": 0.1}}, r"method\.penalty: .*only used with form = \"linear\""),
    ],
)
def test_a_spec_that_stacking_cannot_use_is_refused_before_any_data_is_loaded(changes, message):
    with pytest.raises(SpecError, match=message):
        digits(changes)
