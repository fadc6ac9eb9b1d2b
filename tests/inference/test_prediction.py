"""Predictions for files: inputs as in training, answers against formulas written a second time."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fake_runs import CLASSIFIER, linear_ensemble
from PIL import Image

import ensemblekit as ek
from ensemblekit.data.scaling import TargetScaling
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.inference import prediction
from ensemblekit.inference.answers import answers, numbers
from ensemblekit.inference.files import InputFile, opened
from ensemblekit.inference.prediction import format_predictions, predict_files

FEATURES = ek.DataInfo("classification", (2,), 3)


def classifier(**changes) -> ek.Ensemble:
    """Two members, two features, three classes."""
    weights = torch.tensor([[[1.0, 0], [0, 1], [0, 0]], [[1.0, 0], [0, -1], [0, 2]]])
    options = {"classes": ("ant", "bee", "cow"), **changes}
    return linear_ensemble(ek.load_spec(CLASSIFIER), weights, FEATURES, **options)


def regressor(num_outputs: int = 1) -> ek.Ensemble:
    tables = {"data": {"name": "diabetes"}, "model": {"name": "mlp"}, "training": {"loss": "mse"}}
    weights = torch.tensor([1.0, 2.0, 6.0]).view(3, 1, 1).expand(3, num_outputs, 2)
    return linear_ensemble(ek.load_spec(tables), weights, ek.DataInfo("regression", (2,), num_outputs))


def image_ensemble(shape: tuple[int, int, int], crop: int | None = None) -> ek.Ensemble:
    """One member that sees images of this stored shape, normalised by 0.25 and 0.5; its weights are zero."""
    data = {"name": "digits"} if crop is None else {"name": "digits", "crop_size": crop}
    spec = ek.load_spec({**CLASSIFIER, "ensemble": {"members": 1}, "data": data})
    statistics = (torch.full((shape[0],), value) for value in (0.25, 0.5))
    transform = ImageTransform.of(spec.data, shape).normalised_by(*statistics)
    weights = torch.zeros(1, 2, math.prod(transform.output_shape))
    info = ek.DataInfo("classification", transform.output_shape, 2)
    return linear_ensemble(spec, weights, info, transform=transform)


def seen_by(ensemble: ek.Ensemble, files: list[Path], monkeypatch) -> torch.Tensor:
    """The inputs that reach the ensemble."""
    seen = []
    original = ensemble.network_outputs
    monkeypatch.setattr(ensemble, "network_outputs", lambda inputs: seen.append(inputs) or original(inputs))
    predict_files(ensemble, files)
    return torch.cat(seen)


@pytest.fixture
def table(tmp_path) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text("length,width\n1.5,0.5\n0,3\n")
    return file


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


def entropy(probabilities: list[float]) -> float:
    return -sum(p * math.log(p) for p in probabilities)


def test_a_class_comes_with_probability_agreement_entropy_and_mutual_information(table):
    first, second = (prediction.to_dict() for prediction in predict_files(classifier(), [table]))
    assert (first["file"], first["row"], second["row"]) == (str(table), 1, 2)
    # raw outputs of the row (0, 3): member 0 says (0, 3, 0), member 1 says (0, -3, 6); their mean is (0, 0, 3)
    probabilities = softmax([0, 0, 3])
    members = [softmax([0, 3, 0]), softmax([0, -3, 6])]
    mean = [sum(pair) / 2 for pair in zip(*members, strict=True)]
    assert second["class"] == "cow"
    assert second["probability"] == pytest.approx(probabilities[2])
    assert second["agreement"] == 0.5
    assert second["entropy"] == pytest.approx(entropy(mean))
    information = entropy(mean) - (entropy(members[0]) + entropy(members[1])) / 2
    assert second["mutual_information"] == pytest.approx(information, rel=1e-5)
    assert (first["class"], first["agreement"]) == ("ant", 1.0)


def test_a_class_without_a_name_is_its_index(table):
    assert predict_files(classifier(classes=None), [table])[1].to_dict()["class"] == 2


def test_members_that_say_the_same_have_no_mutual_information(table):
    ensemble = classifier()
    ensemble.members[1] = ensemble.members[0]
    for answer in predict_files(ensemble, [table]):
        assert 0 <= answer.to_dict()["mutual_information"] < 1e-6


def test_the_ensemble_combines_as_its_method_says(table):
    spec = ek.load_spec({**CLASSIFIER, "method": {"name": "boosting", "shrinkage": 0.1}})
    boosted = classifier()
    ensemble = ek.Ensemble(boosted.members, spec, boosted.info, boosted.classes)
    # a tenth of the sum (0, 0, 6)
    assert predict_files(ensemble, [table])[1].to_dict()["probability"] == pytest.approx(softmax([0, 0, 0.6])[2])


def test_a_value_comes_with_its_deviation_over_the_members(table):
    first = predict_files(regressor(), [table])[0].to_dict()
    # the features add up to 2, so members say 2, 4 and 12
    assert first["value"] == pytest.approx(6)
    assert first["standard_deviation"] == pytest.approx(np.std([2, 4, 12]))
    assert set(first) == {"file", "row", "value", "standard_deviation"}


def test_several_values_are_numbered(table):
    first = predict_files(regressor(num_outputs=2), [table])[0].to_dict()
    assert list(first) == ["file", "row", "value_0", "standard_deviation_0", "value_1", "standard_deviation_1"]


@pytest.mark.parametrize("separate_test_file", [False, True])
def test_rows_of_ones_own_table_are_prepared_as_in_training(separate_test_file, tmp_path, monkeypatch):
    rows = [f"{100 + 7 * i},{'red' if i % 3 else 'blue'},{i % 2}" for i in range(40)]
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text("\n".join(["size,colour,label", *rows]))
    data = {"name": "table", "path": str(tmp_path / "train.csv"), "target": "label"}
    if separate_test_file:
        data["test_path"] = str(tmp_path / "test.csv")
    spec = ek.load_spec({**CLASSIFIER, "seed": 5, "data": data})
    expected = ek.load_data(spec.data, spec.seed)
    new = tmp_path / "new.csv"  # without labels, and with the columns the other way round
    new.write_text("\n".join(["colour,size", *(",".join(row.split(",")[1::-1]) for row in rows)]))
    ensemble = linear_ensemble(spec, torch.zeros(3, 2, 3), expected.info, expected.classes)
    seen = {tuple(row) for row in seen_by(ensemble, [new], monkeypatch).tolist()}
    for split in (expected.train, expected.validation, expected.test):
        assert {tuple(row) for row in split.inputs.tolist()} <= seen
    assert len(seen) == 40


def test_a_training_table_that_has_changed_since_is_noticed(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text("a,b,c,label\n" + "".join(f"{i},{i},{i},{i % 2}\n" for i in range(20)))
    spec = ek.load_spec({**CLASSIFIER, "data": {"name": "table", "path": str(file), "target": "label"}})
    ensemble = linear_ensemble(spec, torch.zeros(1, 2, 2), ek.DataInfo("classification", (2,), 2))
    with pytest.raises(ek.DataError, match=r"expected \(2,\) features of the run, got \(3,\)"):
        predict_files(ensemble, [file])


def test_rows_of_long_tables_keep_their_order_and_number(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "BATCH_SIZE", 4)
    file = tmp_path / "long.csv"
    file.write_text("a,b\n" + "".join(f"{row},0\n" for row in range(1, 11)))
    answers = [answer.to_dict() for answer in predict_files(regressor(), [file, file])]
    assert [answer["row"] for answer in answers] == [*range(1, 11), *range(1, 11)]
    assert [answer["value"] for answer in answers[:10]] == pytest.approx([3.0 * row for row in range(1, 11)])


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "WEBP"])
def test_an_image_reaches_the_network_as_in_training(file_format, tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    file = tmp_path / f"image.{file_format.lower()}"
    Image.fromarray(pixels).save(file, **({"lossless": True} if file_format == "WEBP" else {}))
    seen = seen_by(image_ensemble((3, 6, 6), crop=4), [file], monkeypatch)
    expected = (pixels[1:5, 1:5].transpose(2, 0, 1) / 255 - 0.25) / 0.5
    assert seen.shape == (1, 3, 4, 4)
    np.testing.assert_allclose(seen[0], expected, atol=1e-6)


def test_a_jpeg_is_read_as_pillow_reads_it(tmp_path, monkeypatch):
    file = tmp_path / "image.jpg"
    Image.fromarray(np.full((8, 8), 100, dtype=np.uint8)).save(file)
    seen = seen_by(image_ensemble((1, 8, 8)), [file], monkeypatch)
    expected = (np.asarray(Image.open(file))[None] / 255 - 0.25) / 0.5
    np.testing.assert_allclose(seen[0], expected, atol=1e-6)


def test_an_image_of_another_size_is_resized_and_cut_to_its_middle(tmp_path, monkeypatch):
    pixels = np.zeros((16, 32), dtype=np.uint8)
    pixels[:, 8:24] = 255  # the middle square
    file = tmp_path / "wide.png"
    Image.fromarray(pixels).convert("RGB").save(file)  # colours become grey
    seen = seen_by(image_ensemble((1, 8, 8)), [file], monkeypatch)
    assert seen.shape == (1, 1, 8, 8)
    np.testing.assert_allclose(seen[0, 0, :, 1:-1], (1 - 0.25) / 0.5, atol=1e-6)


def test_images_have_no_row(tmp_path):
    file = tmp_path / "image.png"
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(file)
    answer = predict_files(image_ensemble((1, 8, 8)), [file])[0].to_dict()
    assert list(answer) == ["file", "class", "probability", "agreement", "entropy", "mutual_information"]


def test_batches_of_images_are_answered_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "BATCH_SIZE", 2)
    files = [tmp_path / f"{value}.png" for value in (0, 100, 200)]
    for file in files:
        Image.fromarray(np.full((8, 8), int(file.stem), dtype=np.uint8)).save(file)
    ensemble = image_ensemble((1, 8, 8))
    ensemble.members[0][1].weight.data[0] = 1
    probabilities = [answer.to_dict() for answer in predict_files(ensemble, files)]
    assert [answer["file"] for answer in probabilities] == [str(file) for file in files]
    assert [answer["class"] for answer in probabilities] == [1, 0, 0]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("a,b\n1,x\n", ("expected a finite number, got 'x'", 'row 1, column "b"')),
        ("a,b\n1,2\n3,nan\n", ("got 'nan'", "row 2")),
        ("a,b\n1,inf\n", ("got 'inf'", "row 1")),
        ("a,b\n1,2\n3\n", ("expected 2 columns", "got 1", "row 2")),
        ("a,b,c\n1,2,3\n", ("expected 2 columns", "got 3", "header")),
        ("a,b\n", ("at least one row",)),
        ("", ("expected 2 columns", "got 0")),
        ("1,2\n3,4\n", ("expected a header", "line 1")),
        ('a,b\n"1,2\n', ("not a CSV file",)),
        ("a,b\n1,ü\n".encode("latin-1"), ("not a CSV file in UTF-8", "not trained on images")),
    ],
)
def test_a_bad_table_is_an_error_that_names_the_place(content, parts, tmp_path, table):
    file = tmp_path / "bad.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ek.DataError) as caught:
        predict_files(classifier(), [table, file])
    for part in (str(file), *parts):
        assert part in str(caught.value)


def test_a_table_may_begin_with_a_byte_order_mark_and_have_empty_lines(tmp_path):
    file = tmp_path / "excel.csv"
    file.write_bytes("\ufeffa,b\r\n1,2\r\n\r\n3,4\r\n".encode())
    assert [answer.row for answer in predict_files(classifier(), [file])] == [1, 2]


@pytest.mark.parametrize(
    ("content", "parts"),
    [(b"not an image", ("cannot decode image", "PNG, JPEG, WebP or BMP")), (None, ("cannot be read", "No such file"))],
)
def test_a_bad_image_is_an_error_that_names_the_file(content, parts, tmp_path):
    file = tmp_path / "bad.png"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ek.DataError) as caught:
        predict_files(image_ensemble((1, 8, 8)), [file])
    for part in (str(file), *parts):
        assert part in str(caught.value)


def test_an_image_is_not_bent_into_a_shape_that_is_no_square(tmp_path):
    file = tmp_path / "image.png"
    Image.fromarray(np.zeros((6, 8), dtype=np.uint8)).save(file)
    assert len(predict_files(image_ensemble((1, 6, 8)), [file])) == 1
    with pytest.raises(ek.DataError, match="expected an image of 8×6 pixels, got 6×8"):
        predict_files(image_ensemble((1, 8, 6)), [file])


def test_images_of_two_channels_cannot_come_from_files(tmp_path):
    with pytest.raises(ek.DataError, match="2 channels"):
        predict_files(image_ensemble((2, 8, 8)), [tmp_path / "image.png"])


def test_csv_and_json_hold_the_same_records(table):
    predictions = predict_files(classifier(), [table])
    records = json.loads(format_predictions(predictions, "json"))
    rows = list(csv.DictReader(io.StringIO(format_predictions(predictions, "csv"))))
    assert [{key: str(value) for key, value in record.items()} for record in records] == rows
    assert list(records[0]) == ["file", "row", "class", "probability", "agreement", "entropy", "mutual_information"]


def test_a_bad_image_among_others_does_not_stop_them(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "BATCH_SIZE", 2)
    files = [InputFile.of(tmp_path / f"{name}.png") for name in "abcde"]
    for file in files:
        Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(file.path)
    for bad in (files[0], files[1], files[3]):
        bad.path.write_bytes(b"no image")
    failures: list[ek.DataError] = []
    batches = list(prediction.predictions(image_ensemble((1, 8, 8)), files, failures))
    assert [answer.file for batch in batches for answer in batch] == [files[2].name, files[4].name]
    assert [failure.where for failure in failures] == [files[0].name, files[1].name, files[3].name]


def test_one_image_can_come_from_standard_input(tmp_path, monkeypatch):
    Image.fromarray(np.full((8, 8), 200, dtype=np.uint8)).save(tmp_path / "image.png")
    with (tmp_path / "image.png").open() as stdin, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", stdin)
        ensemble, failures = image_ensemble((1, 8, 8)), []
        with opened(["-"], prediction.extensions(ensemble)) as (files, _):
            (batch,) = prediction.predictions(ensemble, files, failures)
    assert (batch[0].to_dict()["file"], failures) == ("-", [])


def test_members_and_probabilities_are_those_of_the_outputs(table):
    second = predict_files(classifier(), [table], probabilities=True, members=True)[1].to_dict()
    # raw outputs of the row (0, 3): member 0 says (0, 3, 0), member 1 says (0, -3, 6); their mean is (0, 0, 3)
    assert [second[f"probability[{name}]"] for name in ("ant", "bee", "cow")] == pytest.approx(softmax([0, 0, 3]))
    assert [second[f"member_class[{index}]"] for index in range(2)] == ["bee", "cow"]
    expected = [max(softmax([0, 3, 0])), max(softmax([0, -3, 6]))]
    assert [second[f"member_probability[{index}]"] for index in range(2)] == pytest.approx(expected)
    values = predict_files(regressor(num_outputs=2), [table], members=True)[0].to_dict()
    assert [values[f"member_value_1[{index}]"] for index in range(3)] == pytest.approx([2, 4, 12])


def test_numbers_have_the_fewest_digits_of_their_precision():
    tenths = [index / 10 for index in range(11)]
    assert numbers(torch.tensor(tenths)) == tenths
    assert numbers(torch.tensor([1 / 3], dtype=torch.float64)) == [1 / 3]
    exact = torch.rand(1000)
    assert torch.equal(torch.tensor(numbers(exact)), exact)


@pytest.mark.parametrize(("std", "expected"), [(1.0, 100.3333333), (1e9, 333333443.0)])
def test_values_in_their_own_units_have_no_digits_that_the_members_cannot_tell_apart(std, expected):
    ensemble = regressor()
    ensemble.target_scaling = TargetScaling((100.0,), (std,))
    answer = next(answers(ensemble, torch.tensor([[[1 / 3]]] * 2), members=True))
    assert answer["value"] == answer["member_value[0]"] == pytest.approx(expected, abs=1.2e-7 * std)
    assert len(str(answer["value"]).replace(".", "").rstrip("0")) <= 10
    ensemble.target_scaling = TargetScaling((16_777_000.0,), (10.0,))
    learned = ensemble.target_scaling.standardise(torch.tensor([[[16_777_217.0]]], dtype=torch.float64)).float()
    (answer,) = answers(ensemble, learned)
    assert answer["value"] == pytest.approx(16_777_217, abs=1e-5)


def test_a_file_name_that_is_not_utf8_can_be_written(tmp_path):
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.csv"))
    file.write_text("length,width\n1.5,0.5\n")
    text = format_predictions(predict_files(classifier(), [file]), "csv")
    assert f"{tmp_path}/?.csv" in text.encode().decode()


def test_json_stays_valid_and_printable_whatever_a_file_is_called():
    name = "caf\udce9\x1b[31m.png"
    text = format_predictions([prediction.Prediction(name, None, {"class": "a\x07b"})], "json")
    assert text.replace("\n", "").isprintable()
    assert json.loads(text.encode()) == [{"file": name, "class": "a\x07b"}]
