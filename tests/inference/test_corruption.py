"""Evaluation on corrupted images: the numbers of images that are corrupted by hand, means, seeds and refusals."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.commands import last_error, run

import ensemblekit as ek
from ensemblekit.core.seeds import generator
from ensemblekit.data.corruptions import CORRUPTIONS

SPEC = {"model": {"name": "mlp", "hidden": [16]}, "ensemble": {"members": 2}, "training": {"epochs": 4}}
SPEC |= {"engine": {"name": "sequential"}}


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> ek.Run:
    path = tmp_path_factory.mktemp("digits") / "run"
    data = {"name": "digits", "limit_train": 400, "normalise": True}
    return ek.train(SPEC | {"data": data}, path, progress=False)


def pixels(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images, (images[:, 0].float().mean(dim=(1, 2)) > 127).long()


@pytest.mark.parametrize("name", ["gaussian_noise", "jpeg"])
def test_the_metrics_are_those_of_images_corrupted_before_they_are_normalised(name, tmp_path):
    images, classes = pixels(400)
    spec = SPEC | {"data": {"name": "given", "normalise": True}}
    trained = ek.train(spec, tmp_path / "run", data=(images, classes), progress=False)
    found = ek.evaluate_run(trained.path, data=(images, classes), corrupt=name, severities=[4])
    changed = [
        CORRUPTIONS[name](chunk.float() / 255, 4, generator(0, "corruption", name, number))
        for number, chunk in enumerate(images.split(256))
    ]
    # floating-point images of Python data are normalised by the run
    clean = ek.evaluate_run(trained.path, data=(torch.cat(changed), classes))
    for metric in ("accuracy", "nll", "ece"):
        assert found[f"corrupt_{metric}_{name}_4"] == pytest.approx(clean[f"test_{metric}"], rel=1e-5)
    assert found["test_nll"] != found["corrupt_nll"]


def test_means_are_over_severities_over_corruptions_and_over_both(digits):
    names, severities = ("contrast", "gaussian_blur"), (1, 5)
    found = ek.evaluate_run(digits.path, corrupt=names, severities=severities)
    for metric in ("accuracy", "nll", "ece"):
        cells = {(n, s): found[f"corrupt_{metric}_{n}_{s}"] for n in names for s in severities}
        assert found[f"corrupt_{metric}"] == pytest.approx(sum(cells.values()) / 4)
        for name in names:
            assert found[f"corrupt_{metric}_{name}"] == pytest.approx((cells[name, 1] + cells[name, 5]) / 2)
        for severity in severities:
            mean = sum(cells[name, severity] for name in names) / 2
            assert found[f"corrupt_{metric}_severity_{severity}"] == pytest.approx(mean)
    assert found["corrupt_nll_contrast_5"] > found["corrupt_nll_contrast_1"] > found["test_nll"]


def test_the_same_images_are_made_each_time_and_the_default_is_everything(digits):
    calls: list[tuple[int, int]] = []
    found = ek.evaluate_run(digits.path, corrupt=True, progress=lambda done, total: calls.append((done, total)))
    assert len([name for name in found if name.startswith("corrupt_accuracy_")]) == 8 * 5 + 8 + 5
    assert calls[-1] == (40, 40)
    again = ek.evaluate_run(digits.path, corrupt="shot_noise", severities=[2])
    assert again["corrupt_nll_shot_noise_2"] == found["corrupt_nll_shot_noise_2"]


def test_images_that_are_streamed_are_corrupted_too(digits, tmp_path):
    images, classes = pixels(60)
    in_memory = ek.train(SPEC, tmp_path / "run", data=(images, classes), progress=False)
    streamed = [(image, int(label)) for image, label in zip(images, classes, strict=True)]
    first = ek.evaluate_run(in_memory.path, data=streamed, corrupt="gaussian_noise", severities=[3])
    second = ek.evaluate_run(in_memory.path, data=(images, classes), corrupt="gaussian_noise", severities=[3])
    assert first["corrupt_nll"] == pytest.approx(second["corrupt_nll"])


def test_a_regression_on_images_has_its_own_metrics(tmp_path):
    images, _ = pixels(60)
    targets = images.float().mean(dim=(1, 2, 3))
    spec = SPEC | {"training": {"epochs": 2, "loss": "mse"}}
    trained = ek.train(spec, tmp_path / "run", data=(images, targets), progress=False)
    found = ek.evaluate_run(trained.path, data=(images, targets), corrupt=["brightness"], severities=[5])
    assert {name for name in found if name.endswith("brightness_5")} == {
        "corrupt_rmse_brightness_5",
        "corrupt_mae_brightness_5",
    }


def test_the_command_prints_a_table_for_each_metric_and_a_flat_object(digits):
    options = ("--corrupt", "gaussian_noise,jpeg", "--severities", "1,3")
    lines = run("evaluate", str(digits.path), *options).stdout.splitlines()
    assert lines[0] == "355 test samples of digits, corrupted"
    assert [line.split()[0] for line in lines if " by severity" in line] == ["accuracy", "NLL", "ECE"]
    assert sum(line.split() == ["corruption", "1", "3", "mean"] for line in lines) == 3
    found = json.loads(run("evaluate", str(digits.path), *options, "--json").stdout)
    assert found["corrupt_accuracy_jpeg_3"] == ek.evaluate_run(digits.path, corrupt="jpeg")["corrupt_accuracy_jpeg_3"]
    everything = run("evaluate", str(digits.path), "--corrupt", "--ood", "digits", "--severities", "1").stdout
    assert "gaussian blur" in everything
    assert "told from" in everything


@pytest.mark.faults
@pytest.mark.parametrize(
    ("options", "part"),
    [
        (
            ("--corrupt", "gausian_noise"),
            '"gausian_noise" is not a corruption; corrupt; did you mean "gaussian_noise"?',
        ),
        (("--corrupt", "--severities", "6"), "6 is not a severity"),
        (("--corrupt", "--severities", "high"), 'expected severities, got "high"'),
        (("--severities", "1"), "add --corrupt"),
    ],
)
def test_what_cannot_be_corrupted_is_refused(options, part, digits):
    result = run("evaluate", str(digits.path), *options)
    assert result.exit_code == 2
    assert part in last_error(result)


@pytest.mark.faults
def test_features_and_images_of_another_range_are_refused(tmp_path):
    spec = SPEC | {"data": {"name": "diabetes"}, "training": {"epochs": 1, "loss": "mse"}}
    table = ek.train(spec, tmp_path / "table", progress=False)
    with pytest.raises(ek.UsageError, match="the inputs of the run are not images, but 10 features"):
        ek.evaluate_run(table.path, corrupt=True)
    images, classes = pixels(60)
    data = (images.float() / 10, classes)
    large = ek.train(SPEC, tmp_path / "large", data=data, progress=False)
    with pytest.raises(ek.DataError, match=r"expected images with values from 0 to 1, got 0 to 25\.5"):
        ek.evaluate_run(large.path, data=data, corrupt="contrast")
