"""A member that is a file of predictions knows the outputs of its samples, and nothing else."""

from __future__ import annotations

import csv
import zipfile

import numpy as np
import pytest
import torch
from ensemblekit_models import prediction_files
from ensemblekit_models.predictions import Predictions
from safetensors.torch import save_file

import ensemblekit as ek
from ensemblekit.core.errors import SpecError
from ensemblekit.core.losses import NLL, CrossEntropy, Exponential

FORMATS = (".safetensors", ".npz", ".csv")
NUM_DIGITS = 1797


def write(path, arrays):
    """Write arrays by the names of splits in the format of the file."""
    if path.suffix == ".safetensors":
        save_file({name: torch.as_tensor(array).contiguous() for name, array in arrays.items()}, path)
    elif path.suffix == ".npz":
        np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["split", "index", *range(next(iter(arrays.values())).shape[1])])
            for name, array in arrays.items():
                writer.writerows([name, index, *row] for index, row in enumerate(np.asarray(array).tolist()))
    return path


def arrays(num_outputs=10, size=30):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, num_outputs, generator=generator) for name in ("train", "validation", "test")}


def spec(path, loss="cross_entropy", data="digits", **model):
    tables = {"data": data, "model": {"name": "predictions", "path": str(path), **model}, "training": {"loss": loss}}
    return ek.load_spec(tables)


def problems(path, **options):
    with pytest.raises(SpecError) as raised:
        spec(path, **options)
    return str(raised.value)


@pytest.mark.parametrize("ending", FORMATS)
def test_every_format_gives_the_outputs_of_the_samples(tmp_path, ending):
    expected = arrays()
    model = Predictions(path=write(tmp_path / f"file{ending}", expected))
    for split, array in expected.items():
        indices = torch.tensor([29, 0, 7])
        outputs = model.known_outputs(split, indices, CrossEntropy())
        assert outputs.dtype == torch.float32
        torch.testing.assert_close(outputs, array[indices], rtol=0, atol=0)


def test_held_out_validation_samples_have_the_indices_of_the_training_data(tmp_path):
    given = arrays()
    del given["validation"]
    model = Predictions(path=write(tmp_path / "file.npz", given))
    torch.testing.assert_close(
        model.known_outputs("validation", torch.tensor([3]), CrossEntropy()), given["train"][3:4]
    )


def test_probabilities_become_outputs_of_the_loss_of_the_spec(tmp_path):
    given = {name: array.softmax(dim=1) for name, array in arrays().items()}
    given["test"][0] = torch.eye(10)[0]
    path = write(tmp_path / "file.npz", given)
    model = spec(path, content="probabilities", smoothing=0.01).model
    outputs = model.known_outputs("test", torch.arange(30), CrossEntropy())
    torch.testing.assert_close(outputs.softmax(dim=1), 0.99 * given["test"] + 0.001)
    nll = spec(path, content="probabilities", smoothing=0.01, softmax=True, loss="nll").model
    torch.testing.assert_close(nll.known_outputs("test", torch.arange(30), NLL()), 0.99 * given["test"] + 0.001)


def test_probabilities_of_two_classes_become_the_output_of_a_margin_loss(tmp_path):
    given = {name: array.softmax(dim=1) for name, array in arrays(2).items()}
    model = Predictions(path=write(tmp_path / "file.npz", given), content="probabilities", smoothing=0)
    outputs = model.known_outputs("test", torch.arange(30), Exponential())
    torch.testing.assert_close(Exponential().probabilities(outputs), given["test"])


def test_unknown_samples_are_counted_and_named(tmp_path):
    given = arrays()
    given["train"][5] = torch.nan
    path = write(tmp_path / "file.npz", given)
    model = Predictions(path=path)
    with pytest.raises(ek.DataError, match="got none of 3, the first with index 5") as raised:
        model.known_outputs("train", torch.tensor([0, 5, 30, 99]), CrossEntropy())
    assert str(path) in raised.value.line
    assert "the array has 30" in raised.value.line


def test_rows_of_a_csv_file_may_have_any_order_and_gaps(tmp_path):
    path = tmp_path / "file.csv"
    path.write_text("split,index,a,b\ntest,1,3,4\ntrain,2,1,2\n\ntest,0,5,6\ntrain,0,7,8\n")
    model = Predictions(path=path)
    assert model.known_outputs("test", torch.tensor([0, 1]), CrossEntropy()).tolist() == [[5, 6], [3, 4]]
    with pytest.raises(ek.DataError, match="the first with index 1"):
        model.known_outputs("train", torch.tensor([0, 1, 2]), CrossEntropy())


def test_there_is_no_network_but_its_shape_is_known():
    network = ek.build_model({"name": "predictions", "path": "some/file.npz"}, (3, 4), 5)
    assert network(torch.empty(2, 3, 4, device="meta")).shape == (2, 5)
    assert not network.state_dict()
    with pytest.raises(ek.UsageError, match=r"has no network: it knows only its predictions.*some/file\.npz"):
        network(torch.rand(2, 3, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": torch.zeros(3)}, "expected shape (samples, outputs), got (3,)"),
        ({"train": torch.zeros(3, 4)}, "expected the same number of outputs in all arrays"),
        ({"train": torch.full((3, 10), torch.inf)}, "expected finite numbers"),
        ({"training": torch.zeros(3, 10)}, 'got "training"'),
    ],
)
@pytest.mark.parametrize("ending", [".safetensors", ".npz"])
def test_arrays_of_other_forms_are_problems_with_the_path(tmp_path, ending, change, message):
    path = write(tmp_path / f"file{ending}", {**arrays(), **change})
    text = problems(path)
    assert message in text
    assert str(path) in text


def test_missing_arrays_other_sizes_and_no_probabilities_are_problems(tmp_path):
    assert 'no "test"' in problems(write(tmp_path / "a.npz", {"train": torch.zeros(3, 10)}))
    path = write(tmp_path / "b.npz", arrays(7))
    assert f"expected 10 outputs for each sample, got 7 ({path})" in problems(path)
    assert "expected 2 probabilities" not in problems(path, content="probabilities")
    assert "not probabilities" in problems(write(tmp_path / "c.npz", arrays()), content="probabilities")
    path = write(tmp_path / "d.npz", {name: torch.ones(3, 1) for name in ("train", "test")})
    assert "no class probabilities" in problems(path, content="probabilities", data="diabetes", loss="mse")
    assert spec(path, data="diabetes", loss="mse").model.path == path


@pytest.mark.parametrize("name", ["missing.npz", "file.txt", "broken.npz", "broken.safetensors", "broken.csv", "b.csv"])
def test_files_that_cannot_be_read_are_problems_with_the_path(tmp_path, name):
    path = tmp_path / name
    if name != "missing.npz":
        path.write_bytes(b"split,index,a\ntest,x,1\n" if name == "b.csv" else b"\xff\xfe nonsense")
    assert str(path) in problems(path)


def test_nothing_is_unpickled(tmp_path):
    path = tmp_path / "file.npz"
    np.savez(path, train=np.array([[object()]]), test=np.zeros((1, 10)))
    assert "NPZ" in problems(path)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_file_that_takes_more_than_half_of_the_memory_is_refused(tmp_path, ending, monkeypatch):
    path = write(tmp_path / f"file{ending}", arrays())
    monkeypatch.setattr(prediction_files, "memory_limit", lambda: 1000)
    assert "stay below half of the memory" in problems(path)


def test_sizes_are_refused_before_anything_of_that_size_is_made(tmp_path):
    bomb, gap = tmp_path / "bomb.npz", tmp_path / "gap.csv"
    with zipfile.ZipFile(bomb, "w") as archive, archive.open("train.npy", "w") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**12, 10)}
        np.lib.format.write_array_header_1_0(file, header)
    gap.write_text("split,index,a\ntrain,999999999999,1\ntest,0,1\n")
    for path in (bomb, gap):
        assert "stay below half of the memory" in problems(path)


def test_predictions_of_a_run_are_the_outputs_that_it_has_kept(tmp_path):
    tables = {
        "data": {"name": "digits", "limit_train": 60, "limit_test": 20},
        "model": {"name": "mlp", "hidden": [8]},
        "ensemble": {"members": 1},
        "training": {"epochs": 1, "batch_size": 30},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    kept = ek.train(tables, out=tmp_path / "run", progress=False).outputs("test")
    whole = torch.full((NUM_DIGITS, 10), torch.nan)
    whole[kept.index] = kept.outputs[0]
    model = spec(write(tmp_path / "file.npz", {"train": whole, "test": whole})).model
    torch.testing.assert_close(model.known_outputs("test", kept.index, CrossEntropy()), kept.outputs[0])
    loss = CrossEntropy()(model.known_outputs("test", kept.index, CrossEntropy()), kept.targets)
    torch.testing.assert_close(loss, CrossEntropy()(kept.outputs[0], kept.targets))
