"""Out-of-distribution detection: against scikit-learn on scores computed here, all forms of data, and refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers.commands import last_error, run
from PIL import Image
from sklearn import metrics as reference
from torch.utils.data import TensorDataset

import ensemblekit as ek

SPEC = {"model": {"name": "mlp", "hidden": [16]}, "ensemble": {"members": 3}, "training": {"epochs": 5}}
SPEC |= {"engine": {"name": "sequential"}}
SCORES = ("max_probability", "entropy", "mutual_information", "variance")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> ek.Run:
    path = tmp_path_factory.mktemp("digits") / "run"
    data = {"name": "digits", "limit_train": 400, "normalise": True}
    return ek.train(SPEC | {"data": data}, path, progress=False)


def noise(count: int = 120) -> torch.Tensor:
    return torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def expected(own: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """From the probabilities of members, (M, N, C) of the run's test data and of other data."""
    probabilities = torch.cat([own, other], dim=1).double().numpy()
    mean = probabilities.mean(axis=0)
    total = -(mean * np.log(mean)).sum(axis=-1)
    aleatoric = -(probabilities * np.log(probabilities)).sum(axis=-1).mean(axis=0)
    scores = {
        "entropy": total,
        "mutual_information": total - aleatoric,
        "variance": probabilities.var(axis=0).mean(axis=-1),
    }
    positive = np.arange(len(total)) >= own.shape[1]
    found = {}
    for name, score in scores.items():
        found[f"ood_auroc_{name}"] = reference.roc_auc_score(positive, score)
        found[f"ood_aupr_{name}"] = reference.average_precision_score(positive, score)
        false_rates, recalls, _ = reference.roc_curve(positive, score, drop_intermediate=False)
        found[f"ood_fpr95_{name}"] = false_rates[recalls >= 0.95].min()
    return found


def test_every_number_is_that_of_scikit_learn(digits):
    found = ek.evaluate_run(digits.path, ood=noise())
    own = digits.outputs("test").outputs.softmax(dim=-1)
    outputs = digits.ensemble.member_outputs(noise())
    for name, value in expected(own, outputs.softmax(dim=-1)).items():
        assert found[name] == pytest.approx(value, abs=2e-3), name
    confidence = torch.cat(
        [
            digits.outputs("test").outputs.mean(dim=0).softmax(-1).amax(-1),
            digits.ensemble.predict_proba(noise()).amax(-1),
        ]
    )
    positive = np.arange(len(confidence)) >= len(own[0])
    area = reference.roc_auc_score(positive, 1 - confidence)
    assert found["ood_auroc_max_probability"] == pytest.approx(area, abs=2e-3)
    assert {f"ood_{measure}_{name}" for measure in ("auroc", "aupr", "fpr95") for name in SCORES} <= found.keys()
    assert found["ood_samples"] == 120
    own_metrics = {name: found[name] for name in digits.metrics}
    assert own_metrics == pytest.approx(digits.metrics, rel=1e-5, abs=1e-6)


def test_the_runs_own_test_data_cannot_be_told_from_itself(digits):
    found = ek.evaluate_run(digits.path, ood="digits")
    for name in SCORES:
        assert found[f"ood_auroc_{name}"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    "form",
    [
        lambda images: images.numpy(),
        lambda images: (images, torch.full((len(images),), 77)),
        lambda images: (images, ["of no class"] * len(images)),
        lambda images: TensorDataset(images, torch.full((len(images),), -5.0)),
        lambda images: (images.float() / 255).numpy(),
    ],
    ids=["array", "other classes", "names", "data set", "floats, not normalised"],
)
def test_all_forms_of_the_same_images_have_the_same_numbers(form, digits):
    first = ek.evaluate_run(digits.path, ood=noise(40))
    second = ek.evaluate_run(digits.path, ood=form(noise(40)))
    assert second == pytest.approx(first, abs=1e-6)


def test_a_folder_of_images_is_prepared_as_the_runs_images(digits, tmp_path):
    (tmp_path / "photos" / "below").mkdir(parents=True)
    for index, image in enumerate(noise(30)):
        Image.fromarray(image[0].numpy()).save(tmp_path / "photos" / "below" / f"{index:02}.png")
    found = ek.evaluate_run(digits.path, ood=tmp_path / "photos")
    assert found == pytest.approx(ek.evaluate_run(digits.path, ood=noise(30)), abs=1e-6)
    assert ek.evaluate_run(digits.path, ood=str(tmp_path / "photos")) == found


def test_another_data_set_is_normalised_by_the_statistics_of_the_run(digits):
    own = ek.evaluate_run(digits.path, ood={"name": "digits", "normalise": False})
    assert own["ood_auroc_entropy"] == pytest.approx(0.5, abs=0.01)


def test_a_table_needs_no_targets_and_is_prepared_by_the_runs_statistics(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = 50 + 10 * torch.randn(300, 2, generator=generator)
    lines = [f"{a:.4f},{b:.4f},{'yes' if a > b else 'no'}" for a, b in rows.tolist()]
    (tmp_path / "train.csv").write_text("\n".join(["a,b,answer", *lines]))
    (tmp_path / "between.csv").write_text("\n".join(["b,a", *[f"{a:.4f},{a:.4f}" for a, _ in rows.tolist()]]))
    data = {"name": "table", "path": str(tmp_path / "train.csv"), "target": "answer"}
    trained = ek.train(SPEC | {"data": data, "training": {"epochs": 40}}, tmp_path / "run", progress=False)
    found = ek.evaluate_run(trained.path, ood=str(tmp_path / "between.csv"))
    assert found["ood_samples"] == 300
    assert found["ood_auroc_entropy"] > 0.8  # all lie on the border of the classes


def test_a_regression_has_the_variance_of_its_members_alone(tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 2, generator=generator)
    spec = SPEC | {"training": {"epochs": 20, "loss": "mse"}}
    trained = ek.train(spec, tmp_path / "run", data=(inputs, 100 * inputs.sum(dim=1)), progress=False)
    found = ek.evaluate_run(trained.path, ood=20 * inputs)
    assert {name for name in found if name.startswith("ood_auroc")} == {"ood_auroc_variance"}
    assert found["ood_auroc_variance"] > 0.9
    deviation = trained.ensemble.member_outputs(20 * inputs).std(dim=0, correction=0).squeeze(1)
    own = trained.outputs("test").outputs.std(dim=0, correction=0).squeeze(1)
    positive = np.arange(len(own) + 300) >= len(own)
    area = reference.roc_auc_score(positive, torch.cat([own, deviation]).numpy())
    assert found["ood_auroc_variance"] == pytest.approx(area, abs=1e-6)


def test_a_single_member_has_no_disagreement_to_go_by(tmp_path):
    spec = SPEC | {"data": {"name": "digits", "limit_train": 200}, "ensemble": {"members": 1}}
    trained = ek.train(spec, tmp_path / "run", progress=False)
    found = ek.evaluate_run(trained.path, ood=noise())
    assert (found["ood_auroc_mutual_information"], found["ood_auroc_variance"]) == (0.5, 0.5)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("data", "part"),
    [
        ("diabetes", "expected inputs of shape (1, 8, 8), as in the run, got (10,)"),
        ('{name="digits", size=12}', 'got (1, 12, 12); data set "digits"; resize them: {name="digits", size=8}'),
        ("nowhere/photos", "nowhere/photos"),
        ("pictures", 'data.name: "pictures" is not a registered data set|"pictures" is not a registered'),
    ],
)
def test_data_that_does_not_fit_is_an_error(data, part, digits):
    result = run("evaluate", str(digits.path), "--ood", data)
    assert result.exit_code in (2, 3)
    assert any(text in last_error(result) for text in part.split("|"))
    assert result.stdout == ""


@pytest.mark.faults
def test_arrays_of_another_shape_and_two_kinds_of_data_are_errors(digits):
    with pytest.raises(ek.DataError, match=r"expected inputs of shape \(1, 8, 8\), got \(1, 9, 8\)"):
        ek.evaluate_run(digits.path, ood=np.zeros((5, 1, 9, 8), np.float32))
    with pytest.raises(ek.UsageError, match="always compared with the run's own test data"):
        ek.evaluate_run(digits.path, data="digits", ood="digits")


def test_the_command_prints_a_table_and_a_flat_object(digits, tmp_path):
    Image.fromarray(noise(1)[0, 0].numpy()).save(tmp_path / "one.png")
    result = run("evaluate", str(digits.path), "--ood", str(tmp_path))
    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.stdout.startswith(f"1 sample of {tmp_path}, told from 355 test samples of digits\n")
    assert ["score", "AUROC", "AUPR", "FPR", "at", "95", "%", "TPR"] in lines
    assert {"entropy", "variance"} <= {line[0] for line in lines if line}
    found = json.loads(run("evaluate", str(digits.path), "--ood", str(tmp_path), "--json").stdout)
    assert found == pytest.approx(dict(ek.evaluate_run(digits.path, ood=tmp_path)))
    assert "confusion" in json.loads(
        run("evaluate", str(digits.path), "--ood", "digits", "--json", "--per-class").stdout
    )
