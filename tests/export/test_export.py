"""Exported files give what the run predicts, describe themselves, and appear only if they do."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import last_error, run
from helpers.places import ROOT
from helpers.tiny_runs import SPEC

import ensemblekit as ek
from ensemblekit.cli import export as cli_export
from ensemblekit.core.errors import RunError, UsageError
from ensemblekit.export import exporting, formats, onnx_files, torch_files
from ensemblekit.export.onnx_operators import translations
from ensemblekit.inference.prediction import predict_files

onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A calibrated run on images with prediction sets."""
    data = {**SPEC["data"], "limit_train": 100, "validation_fraction": 0.3, "normalise": True}
    path = ek.train({**SPEC, "data": data}, tmp_path_factory.mktemp("digits") / "run", progress=False).path
    ek.calibrate(path, "vector")
    ek.conform(path, 0.2)
    return path


@pytest.fixture(scope="module")
def digits_file(digits, tmp_path_factory):
    """The run as a file of torch.export, and what the export said."""
    return ek.export(digits, "torch", tmp_path_factory.mktemp("exported") / "model.pt2")


def write_rows(path: Path, num_rows: int, unknown: str | None = None) -> None:
    random = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["colour", "size", "year", "price"])
        for index in range(num_rows):
            colour = random.choice(["red", "green", "blue"]) if unknown is None or index else unknown
            size = "" if index % 5 == 3 else round(random.normal(1e6, 3), 3)
            price = 1e5 + 300 * random.normal()
            writer.writerow(["" if index % 7 == 2 else colour, size, random.integers(1990, 2020), price])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A regression on a table with missing values and intervals; its training file is gone."""
    folder = tmp_path_factory.mktemp("table")
    write_rows(folder / "prices.csv", 60)
    spec = {
        **{key: SPEC[key] for key in ("model", "ensemble", "engine")},
        "data": {"name": "table", "path": str(folder / "prices.csv"), "target": "price", "validation_fraction": 0.3},
        "training": {"epochs": 2, "batch_size": 20, "loss": "quantile"},
    }
    path = ek.train(spec, folder / "run", progress=False).path
    ek.conform(path, 0.2, "normalised")
    (folder / "prices.csv").unlink()
    return path


def codes_and_numbers(file: Path, inputs: list[dict]) -> dict[str, np.ndarray]:
    """The inputs of a graph for the rows of a file, made from the graph's own description."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    made = {}
    for described in inputs:
        columns = described["columns"]
        if described["name"] == "numbers":
            values = [[float(row[name] or "nan") for name in columns] for row in rows]
        else:
            positions = [(c["name"], {name: i for i, name in enumerate(c["categories"])}) for c in columns]
            values = [[known.get(row[name] or "(missing)", -1) for name, known in positions] for row in rows]
        made[described["name"]] = np.array(values, dtype=described["type"])
    return made


def test_an_onnx_graph_prepares_a_table_and_predicts_as_the_run_does(table, tmp_path):
    exported = ek.export(table, "onnx", tmp_path / "model.onnx")
    assert exported.facts["largest_difference"] < 1e-5
    assert any("compared on random inputs" in note for note in exported.notes)
    write_rows(tmp_path / "new.csv", 20, unknown="mauve")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    saved = session.get_modelmeta().custom_metadata_map
    inputs = codes_and_numbers(tmp_path / "new.csv", json.loads(saved["inputs"]))
    assert inputs["categories"][0, 0] == -1
    assert [node.shape for node in session.get_inputs()] == [["batch", 2], ["batch", 1]]
    names = [node.name for node in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, inputs), strict=True))
    answers = [one.answer for one in predict_files(ek.load(table), [tmp_path / "new.csv"])]
    columns = {"prediction": "value", "quantile_0.05": "quantile_0.05", "low": "low", "high": "high"}
    for name, column in columns.items():
        expected = [answer[column] for answer in answers]
        np.testing.assert_allclose(outputs[name][:, 0], expected, rtol=0, atol=0.01)  # of a deviation of 300
    assert json.loads(saved["conformal"])["score"] == "normalised"


def test_a_torch_file_predicts_as_the_calibrated_run_does(digits, digits_file):
    ensemble, graph = ek.load(digits), torch.export.load(digits_file.path).module()
    images = torch.rand(7, 1, 8, 8)  # before normalisation
    inputs = ensemble.transform.plain(images)
    for size in (1, 7):
        outputs = graph(images[:size])
        torch.testing.assert_close(outputs["probabilities"], ensemble.predict_proba(inputs[:size]))
        torch.testing.assert_close(outputs["member_outputs"], ensemble.member_outputs(inputs[:size]))
    members = ensemble.member_outputs(inputs).softmax(-1)
    mean = members.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    torch.testing.assert_close(outputs["entropy"], entropy)
    aleatoric = -(members * members.log()).sum(-1).mean(0)
    torch.testing.assert_close(outputs["mutual_information"], entropy - aleatoric, rtol=1e-3, atol=1e-6)


def test_a_file_says_what_it_is_and_holds_neither_paths_nor_samples(digits, digits_file):
    extra = {torch_files.METADATA_FILE: ""}
    program = torch.export.load(digits_file.path, extra_files=extra)
    saved = json.loads(extra[torch_files.METADATA_FILE])
    assert saved["classes"] == [str(digit) for digit in range(10)]
    assert saved["spec_sha256"] == hashlib.sha256((digits / "spec.toml").read_bytes()).hexdigest()
    assert saved["metrics"]["test_accuracy"] == ek.evaluate_run(digits)["test_accuracy"]
    assert saved["calibration"] == "vector"
    assert saved["conformal"]["thresholds"] == list(ek.load(digits).conformal.thresholds)
    assert saved["inputs"][0] | {"description": ""} == {
        "name": "images", "type": "float32", "shape": [None, 1, 8, 8], "description": "",
    }  # fmt: skip
    assert not program.example_inputs[0][0].any()
    with zipfile.ZipFile(digits_file.path) as archive:
        assert not any(str(ROOT).encode() in archive.read(name) for name in archive.namelist())


def test_images_can_be_given_as_bytes(digits, tmp_path):
    result = run("export", str(digits), "--format", "torch", "--input-type", "uint8", "--json",
                 "--output", str(tmp_path / "model.pt2"))  # fmt: skip
    facts = json.loads(result.stdout)
    assert facts["compared_on"] == "20 test samples"
    assert facts["batch_sizes"] == [1, 3, 20]
    images = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)
    outputs = torch.export.load(tmp_path / "model.pt2").module()(images)
    torch.testing.assert_close(outputs["probabilities"], ek.load(digits).predict_proba(images))


def test_the_command_prints_inputs_outputs_the_difference_and_how_to_use_the_file(digits, tmp_path, monkeypatch):
    def write(request):
        facts = {"inputs": [{"name": "images", "type": "uint8", "shape": [None, 1, 8, 8], "description": "images"}],
                 "largest_difference": 2e-7, "compared_on": "20 test samples", "batch_sizes": [1, 20]}  # fmt: skip
        return formats.Exported(request.output, "onnx", 12_345, "import onnxruntime", facts, ("mind the gap",))

    monkeypatch.setitem(exporting.FORMATS, "onnx", formats.Format("model.onnx", write))
    result = run("export", str(digits))
    assert result.stdout.splitlines() == [
        "note: mind the gap",
        f"{digits / 'model.onnx'}  (12 kB)",
        "       name    type   shape             content",
        "input  images  uint8  (batch, 1, 8, 8)  images",
        "largest difference from the original: 2.0e-07, on 20 test samples in batches of 1, 20",
        "",
        "import onnxruntime",
    ]


def test_a_graph_that_differs_is_an_error_and_leaves_the_older_file(digits, tmp_path, monkeypatch):
    real = torch_files.torch_runner

    def wrong(path):
        graph = real(path)
        return lambda inputs: {name: value + 2e-4 for name, value in graph(inputs).items()}

    monkeypatch.setattr(torch_files, "torch_runner", wrong)
    file = tmp_path / "model.pt2"
    file.write_text("older")
    result = run("export", str(digits), "--format", "torch", "--output", str(file))
    assert result.exit_code == 6
    assert "differs from the original by 0.0002" in last_error(result)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    assert file.read_text() == "older"


def test_a_missing_extra_is_named_before_anything_is_done(monkeypatch):
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxscript" else object())
    result = run("export", "nowhere")
    assert result.exit_code == 2
    assert "needs onnxscript, which is not installed" in last_error(result)
    assert "pip install 'ensemblekit[onnx]'" in last_error(result)


def test_what_cannot_be_exported_is_refused(digits, tmp_path):
    shutil.copytree(digits, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(RunError):
        ek.export(tmp_path / "run", "torch")
    with pytest.raises(UsageError, match='no format "onyx"'):
        ek.export(digits, "onyx")


def test_members_that_are_files_have_no_graph(tmp_path):
    from safetensors.torch import save_file

    known = tmp_path / "known.safetensors"
    save_file({"train": torch.zeros(2000, 10), "test": torch.zeros(2000, 10)}, known)
    models = [SPEC["model"], {"name": "predictions", "path": str(known)}]
    groups = [{"members": 1, "model": model} for model in models]
    spec = {**SPEC, "ensemble": {"groups": groups}, "training": {"epochs": 1, "batch_size": 20}}
    run_path = ek.train(spec, tmp_path / "run", progress=False).path
    with pytest.raises(UsageError, match='the model "predictions" has no network'):
        ek.export(run_path, "torch")


def test_the_command_offers_every_format():
    assert list(exporting.FORMATS) == list(cli_export.FORMATS)


def test_the_function_is_not_hidden_by_its_package():
    assert callable(ek.export)
    assert ek.export.__signature__.parameters.keys() >= {"path", "format", "output"}


def test_operations_that_torch_cannot_translate_are_right_in_onnx(tmp_path):
    class Operations(torch.nn.Module):
        def forward(self, values, others):
            exact = "donot_use_mm_for_euclid_dist"
            distances = [torch.cdist(values, others, p=p, compute_mode=exact) for p in (1.0, 2.0, 3.0, torch.inf)]
            places = torch.searchsorted(others[:, 0].sort().values, values[:, 0].contiguous())
            return (*distances, places)

    inputs = (torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64))
    program = torch.export.export(Operations(), inputs)
    names = ["one", "two", "three", "infinity", "places"]
    onnx_files.translate(program, ["values", "others"], names).save(tmp_path / "model.onnx")
    outputs = onnx_files.onnx_runner(tmp_path / "model.onnx")(inputs)
    for actual, expected in zip(outputs.values(), Operations()(*inputs), strict=True):
        torch.testing.assert_close(actual, expected)
    assert len(translations()) == 2
