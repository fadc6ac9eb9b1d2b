"""With folds, no member learns from its own, and out-of-fold predictions are those of plain cross-validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stopping import Stop, StopBefore
from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.core.errors import SpecError
from ensemblekit.core.hooks import RunHooks
from ensemblekit.display.summary import run_summary
from ensemblekit.members.build import build_member
from ensemblekit.spec.overview import spec_overview

FOLDS, MEMBERS = 3, 4
SPEC: dict[str, Any] = {
    "data": {"name": "digits", "limit_train": 60, "limit_test": 20, "folds": FOLDS},
    "model": {"name": "mlp", "hidden": [8], "batch_norm": False},
    "ensemble": {"members": MEMBERS},
    "training": {"epochs": 3, "batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.5}},
    "engine": {"name": "stacked", "device": "cpu"},
}


def _train(path: Path, **sections: Any) -> ek.Run:
    merged = {name: {**SPEC.get(name, {}), **table} for name, table in sections.items() if isinstance(table, dict)}
    return ek.train({**SPEC, **sections, **merged}, path, progress=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ek.Run:
    return _train(tmp_path_factory.mktemp("folds") / "run")


@pytest.fixture(scope="module")
def train_split(run: ek.Run) -> Any:
    return ek.load_data(run.spec.data, run.spec.seed).train


def _trained_alone(run: ek.Run, member: int, weights: Tensor | None = None) -> nn.Module:
    """Train a member in plain torch on batches without the samples of its fold."""
    data, settings = ek.load_data(run.spec.data, run.spec.seed), run.spec.training
    network = build_member(run.spec.model, data.info.input_shape, data.info.num_outputs, run.spec.seed, member)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    assert data.train.folds is not None
    for epoch in range(1, settings.epochs + 1):
        for batch in data.train.training_batches(settings.batch_size, run.spec.seed, epoch):
            seen = data.train.folds[batch.index] != member % FOLDS
            losses = nn.functional.cross_entropy(network(batch.inputs[seen]), batch.targets[seen], reduction="none")
            if weights is not None:
                losses = losses * weights[batch.index][seen]
            optimizer.zero_grad()
            (losses.mean() / MEMBERS).backward()
            optimizer.step()
    return network.eval()


def _inputs(train: Any) -> Tensor:
    return torch.cat([batch.inputs for batch in train.batches(1000)])


def test_out_of_fold_predictions_are_those_of_networks_trained_alone_on_the_other_folds(
    run: ek.Run, train_split: Any
) -> None:
    networks = [_trained_alone(run, member) for member in range(MEMBERS)]
    with torch.no_grad():
        outputs = torch.stack([network(_inputs(train_split)) for network in networks])
    # members 0 and 3 leave out fold 0, 1 and 2 one fold each
    expected = torch.stack([(outputs[0] + outputs[3]) / 2, outputs[1], outputs[2]])
    expected = expected[train_split.folds, torch.arange(len(train_split))]
    predictions = run.out_of_fold_predictions()
    torch.testing.assert_close(predictions, expected.softmax(dim=-1), atol=1e-5, rtol=1e-4)
    kept = run.outputs("out_of_fold")
    assert torch.equal(kept.index, train_split.indices)
    correct = expected.argmax(dim=-1) == kept.targets
    assert run.metrics["out_of_fold_accuracy"] == pytest.approx(float(correct.double().mean()))
    loss = nn.functional.cross_entropy(expected, kept.targets)
    assert run.metrics["out_of_fold_loss"] == pytest.approx(float(loss), rel=1e-4)


def test_out_of_fold_outputs_name_the_members_that_gave_them(run: ek.Run, train_split: Any) -> None:
    kept = run.outputs("out_of_fold")
    assert kept.members is not None
    assert kept.members.tolist() == [
        train_split.folds.tolist(),
        [3 if fold == 0 else -1 for fold in train_split.folds.tolist()],
    ]
    with torch.no_grad():
        outputs = run.ensemble.member_outputs(_inputs(train_split))
    for row, members in enumerate(kept.members):
        answered = (members >= 0).nonzero().flatten()
        torch.testing.assert_close(kept.outputs[row, answered], outputs[members[answered], answered])
        assert not bool(kept.outputs[row, members < 0].any())


def test_evaluation_shows_the_metrics_out_of_fold(run: ek.Run) -> None:
    evaluated = ek.evaluate_run(run.path)
    assert evaluated["out_of_fold_loss"] == run.metrics["out_of_fold_loss"]
    recombined = ek.evaluate_run(run.path, combiner="mean")
    assert recombined["out_of_fold_loss"] == pytest.approx(run.metrics["out_of_fold_loss"], rel=1e-5)
    assert "out_of_fold_accuracy" not in ek.evaluate_run(run.path, data="digits")


@pytest.mark.parametrize("engine", ["sequential", "threaded"])
def test_engines_agree_on_folds(run: ek.Run, engine: str, tmp_path: Path) -> None:
    other = _train(tmp_path / "run", engine={"name": engine})
    torch.testing.assert_close(other.outputs("out_of_fold").outputs, run.outputs("out_of_fold").outputs)


def test_a_resumed_run_with_folds_is_bit_identical(run: ek.Run, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        ek.train(SPEC, tmp_path / "run", progress=StopBefore(3))
    resumed = ek.resume(tmp_path / "run", progress=False)
    assert torch.equal(resumed.outputs("out_of_fold").outputs, run.outputs("out_of_fold").outputs)
    assert resumed.metrics == run.metrics


def test_outputs_that_were_not_kept_are_computed_again(run: ek.Run, tmp_path: Path) -> None:
    other = _train(tmp_path / "run", training={"keep_outputs": False})
    kept, expected = other.outputs("out_of_fold"), run.outputs("out_of_fold")
    torch.testing.assert_close(kept.outputs, expected.outputs)
    assert kept.members is not None
    assert torch.equal(kept.members, expected.members)


def test_weights_of_bagging_and_folds_are_multiplied(tmp_path: Path, run: ek.Run) -> None:
    bagged = _train(tmp_path / "run", method="bagging", training={"epochs": 1})
    num_samples = len(run.outputs("out_of_fold"))
    hooks = RunHooks(bagged.spec.methods)
    weights = hooks.sample_weights(num_samples, MEMBERS, 0)
    assert weights is not None
    alone = _trained_alone(bagged, 1, weights[:, 1])
    trained = bagged.ensemble.state_dict()
    for name, value in alone.state_dict().items():
        matching = [tensor for key, tensor in trained.items() if key.endswith(f"1.{name}")]
        assert len(matching) == 1, list(trained)
        torch.testing.assert_close(matching[0], value, atol=1e-5, rtol=1e-4)


# the folds of real values do not depend on them, so that some can be changed without moving any sample
VALUES: dict[str, Any] = {
    "data": {"folds": FOLDS, "validation_fraction": 0, "standardise_targets": False},
    "model": {"name": "mlp", "hidden": [8], "batch_norm": True},
    "ensemble": {"members": FOLDS},
    "training": {"epochs": 2, "batch_size": 8},
    "engine": {"name": "sequential", "device": "cpu"},
}


CHANGES: list[dict[str, Any]] = [
    {},
    {"training": {**VALUES["training"], "mix": "mixup"}},
    {"method": {"name": "swa", "start": 0}},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_no_target_has_an_effect_on_the_prediction_of_its_own_sample(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 3, generator=source), torch.randn(40, 1, generator=source)
    first = ek.train({**VALUES, **changes}, tmp_path / "a", False, data=((inputs, targets), (inputs, targets)))
    members = first.outputs("out_of_fold").members
    assert members is not None
    changed = torch.where((members[0] == 1).unsqueeze(1), targets + 5, targets)
    second = ek.train({**VALUES, **changes}, tmp_path / "b", False, data=((inputs, changed), (inputs, changed)))
    outputs = [run.outputs("out_of_fold").outputs[0] for run in (first, second)]
    assert torch.equal(outputs[0][members[0] == 1], outputs[1][members[0] == 1])
    assert not torch.equal(outputs[0][members[0] != 1], outputs[1][members[0] != 1])


def test_fitted_members_leave_out_their_fold(tmp_path: Path) -> None:
    from sklearn.linear_model import Ridge

    source = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 3, generator=source), torch.randn(40, 1, generator=source)
    # an ensemble needs a member that learns by gradients: the fourth one
    groups = [{"members": FOLDS, "model": {"name": "sklearn", "estimator": "ridge"}}, {"members": 1}]
    spec = {**VALUES, "ensemble": {"groups": groups}, "training": {"epochs": 1}}
    run = ek.train(spec, tmp_path / "run", False, data=((inputs, targets), (inputs, targets)))
    kept = run.outputs("out_of_fold")
    assert kept.members is not None
    for fold in range(FOLDS):
        own = (kept.members[0] == fold).numpy()
        ridge = Ridge().fit(inputs.numpy()[~own], targets.numpy()[~own])
        expected = torch.from_numpy(ridge.predict(inputs.numpy()[own])).reshape(-1, 1).float()
        torch.testing.assert_close(kept.outputs[0, torch.from_numpy(own)], expected, atol=1e-4, rtol=1e-4)


REFUSED = [
    ({"ensemble": {"members": 2}}, "3 folds for 2 members"),
    ({"method": {"name": "gncl", "lambda": 0.3}}, '"gncl" lets members learn from the outputs of others'),
    ({"method": "end_to_end"}, '"end_to_end" lets members learn'),
    ({"method": "boosting"}, '"boosting" lets members learn'),
    ({"method": "ncl"}, '"ncl" lets members learn'),
    ({"model": {"name": "tabm"}}, 'the members of "tabm" share weights'),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_what_would_leak_is_refused_in_the_spec(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ek.load_spec({**SPEC, **sections})


def test_gncl_without_coupling_is_not_refused() -> None:
    ek.load_spec({**SPEC, "method": {"name": "gncl", "lambda": 0}})


def test_a_method_that_reweights_by_outputs_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ek.UsageError, match='"adaboost" decides by the outputs of all members'):
        _train(tmp_path / "run", method="adaboost", training={"epochs": 4})
    assert not (tmp_path / "run" / "spec.toml").exists()


class Sly(ek.Method):
    """Claims to train members by themselves, and does not."""

    def separable(self) -> bool:
        return True

    @ek.hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Any) -> Tensor:
        return loss(combined, target)


def test_a_loss_that_ignores_weights_is_found_by_its_gradient(tmp_path: Path) -> None:
    with pytest.raises(ek.UsageError, match='with "sly", a member learns also from samples of weight 0'):
        ek.train({**SPEC, "method": "sly"}, tmp_path / "run", progress=False, plugins=[Sly])


def test_runs_without_folds_say_so(tmp_path: Path, run: ek.Run) -> None:
    chosen = ek.select(run.path, members=2, out=tmp_path / "chosen").run
    assert chosen.spec.data.folds is None
    with pytest.raises(ek.UsageError, match="no out-of-fold outputs"):
        chosen.outputs("out_of_fold")


def test_the_plan_and_the_summary_show_the_folds(run: ek.Run) -> None:
    text = "member i is trained without fold i mod 3; 1 or 2 of 4 members predict each training sample out of fold"
    assert ("  folds", text) in spec_overview(run.spec)
    summary = run_summary(run.path, run.spec, run.metrics, run.members, {})
    accuracy = f"accuracy {100 * run.metrics['out_of_fold_accuracy']:.2f} %"
    assert summary.out_of_fold.startswith(f"out of fold: {accuracy}, loss ")


def test_without_validation_data_the_fix_says_why_folds_do_not_help(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", data={"validation_fraction": 0}, training={"epochs": 1})
    with pytest.raises(ek.UsageError, match="out-of-fold outputs cannot take its place"):
        ek.calibrate(run.path)


def test_stochastic_passes_are_combined_out_of_fold(tmp_path: Path) -> None:
    method, model = {"name": "dropout", "passes": 2}, {"dropout": 0.5}
    run = _train(tmp_path / "run", method=method, model=model, training={"epochs": 1})
    kept = run.outputs("out_of_fold")
    assert kept.outputs.shape[:2] == (2 * 2, 60)
    own = kept.outputs.unflatten(0, (2, 2))[:, 0].mean(dim=0).softmax(dim=-1)  # of samples with one member
    one = kept.members[1] < 0
    torch.testing.assert_close(run.out_of_fold_predictions()[one], own[one])
