"""Folders as the package `datasets` writes them, read without it and compared with what was written."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from datasets import ClassLabel, Dataset, DatasetDict, Features, Sequence, Value, disable_progress_bars
from datasets import Image as ImageFeature
from ensemblekit_datasets import arrow_splits, folder_loading
from ensemblekit_datasets.huggingface import HuggingFace
from PIL import Image
from pyarrow import parquet

import ensemblekit as ek
from ensemblekit.cli import main
from ensemblekit.testing import run_contract

disable_progress_bars()
FEATURES = Features(
    {
        "image": ImageFeature(),
        "label": ClassLabel(names=["cat", "dog"]),
        "width": Value("float32"),
        "embedding": Sequence(Value("float64"), length=2),
        "text": Value("string"),
    }
)
SIZES = {"train": 12, "test": 4}


def rows(split: str) -> dict[str, list]:
    """The rows of a split, with pixels as arrays (8, 8, 3)."""
    random = np.random.default_rng(len(split))
    number = SIZES[split]
    return {
        "image": [random.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(number)],
        "label": [index % 2 for index in range(number)],
        "width": [float(value) for value in random.normal(5, 2, number)],
        "embedding": random.normal(size=(number, 2)).tolist(),
        "text": [f"{index % 3}" for index in range(number)],
    }


def dataset(split: str) -> Dataset:
    content = rows(split)
    return Dataset.from_dict(content | {"image": list(map(Image.fromarray, content["image"]))}, features=FEATURES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The same data set as Arrow and as Parquet files, and its training split alone."""
    folder = tmp_path_factory.mktemp("huggingface")
    splits = DatasetDict({split: dataset(split) for split in SIZES})
    splits.save_to_disk(folder / "arrow")
    splits["train"].save_to_disk(folder / "single")
    (folder / "parquet" / "data").mkdir(parents=True)
    splits["test"].to_parquet(folder / "parquet" / "data" / "test-00000-of-00001.parquet")
    for shard in range(2):
        part = splits["train"].shard(2, shard, contiguous=True)
        part.to_parquet(folder / "parquet" / "data" / f"train-0000{shard}-of-00002.parquet")
    return {name: folder / name for name in ("arrow", "parquet", "single")}


@pytest.fixture
def changed(folders, tmp_path):
    """Copies a folder, to be changed."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folders[name], tmp_path / name))

    return copy


@pytest.mark.parametrize("storage", ["memory", "stream"])
@pytest.mark.parametrize("name", ["arrow", "parquet"])
def test_images_and_labels_are_those_that_were_written(folders, name, storage, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it is now an ImportError
    splits = HuggingFace(path=folders[name], storage=storage).load(seed=0)
    for split, loaded in {"train": splits.train, "test": splits.test}.items():
        written = rows(split)
        pairs = (
            list(zip(*loaded, strict=True)) if isinstance(loaded, tuple) else [loaded[i] for i in range(len(loaded))]
        )
        assert isinstance(loaded, tuple) == (storage == "memory")
        assert torch.equal(
            torch.stack([image for image, _ in pairs]), torch.tensor(np.stack(written["image"])).permute(0, 3, 1, 2)
        )
        assert [int(target) for _, target in pairs] == written["label"]
    assert splits.classes == ("cat", "dog")
    assert splits.info == ek.DataInfo("classification", (3, 8, 8), 2)
    assert splits.notes[0] == ("columns", "image → label; ignored: width, embedding, text")


def test_numbers_are_standardised_by_the_training_rows_alone(folders):
    data = HuggingFace(path=folders["parquet"], features=("width", "embedding"), validation_fraction=0.25)
    splits = data.load(seed=0)
    written = {split: np.column_stack([rows(split)["width"], rows(split)["embedding"]]) for split in SIZES}
    written = {split: values.astype(np.float32).astype(float) for split, values in written.items()}
    used = written["train"][splits.indices["train"].numpy()]
    assert len(used) == 9
    expected = (written["test"] - used.mean(axis=0)) / used.std(axis=0)
    assert torch.allclose(splits.test[0], torch.tensor(expected).float(), atol=1e-5)
    assert splits.info == ek.DataInfo("classification", (3,), 2)


@pytest.mark.parametrize(
    ("parameters", "task", "classes"),
    [
        ({"target": "text"}, "classification", ("0", "1", "2")),
        ({"target": "width"}, "regression", None),
        ({"target": "embedding"}, "regression", None),
    ],
)
def test_text_is_classes_and_fractions_are_values(folders, parameters, task, classes):
    splits = HuggingFace(path=folders["arrow"], **parameters).load(seed=0)
    assert (splits.info.task, splits.classes) == (task, classes)
    written = rows("test")[parameters["target"]]
    if task == "regression":
        assert torch.allclose(splits.test[1].squeeze(), torch.tensor(written).double(), atol=1e-5)
        assert splits.standardise_targets
    else:
        assert splits.test[1].tolist() == [int(text) for text in written]


def test_without_a_test_split_a_share_of_each_class_is_held_out(folders):
    splits = HuggingFace(path=folders["single"], test_fraction=0.5).load(seed=0)
    assert sorted(splits.test[1].tolist()) == [0, 0, 0, 1, 1, 1]
    assert set(splits.indices["test"].tolist()).isdisjoint(splits.indices["train"].tolist())
    streamed = HuggingFace(path=folders["single"], test_fraction=0.5, storage="stream").load(seed=0)
    assert torch.equal(torch.stack([streamed.test[i][0] for i in range(6)]), splits.test[0])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["a.parquet", "b.parquet"], {"train": 2}),
        (["train/0000.parquet", "test/0000.parquet"], {"train": 1, "test": 1}),
        (["data/dev-00000-of-00001-0a1b2c.parquet", "data/train.parquet"], {"dev": 1, "train": 1}),
    ],
)
def test_splits_are_known_by_the_names_of_files_and_folders(folders, tmp_path, files, expected):
    source = folders["parquet"] / "data" / "test-00000-of-00001.parquet"
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / file)
    found = arrow_splits.find_splits(tmp_path)
    assert {name: len(split.files) for name, split in found.items()} == expected
    HuggingFace(path=tmp_path).load(seed=0)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"path": Path("nowhere")}, "no such folder"),
        ({"target": "lable"}, r'no column "lable"(.|\n)*did you mean "label"'),
        ({"features": ("width", "text")}, 'column "text" holds string, not numbers'),
        ({"features": ("image", "width")}, "cannot be combined"),
        ({"features": ("label",)}, "among the features"),
        ({"test_split": "valid"}, r'no split "valid"(.|\n)*train, test'),
        ({"target": "width", "task": "classification"}, "holds float, expected classes"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(folders, parameters, text):
    with pytest.raises(ek.DataError, match=text) as caught:
        HuggingFace(**{"path": folders["arrow"]} | parameters).load(seed=0)
    assert caught.value.exit_code == 3


def png(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("storage", ["memory", "stream"])
@pytest.mark.parametrize(
    ("image", "text"),
    [
        ({"bytes": png((8, 8))[:-30], "path": None}, "cannot decode image"),
        ({"bytes": png((9, 8)), "path": None}, r"expected 3×8×8 like the first, got 3×8×9(.|\n)*data.size"),
        ({"bytes": None, "path": "/etc/hostname"}, "only its path '/etc/hostname'"),
        (None, "there is no image"),
    ],
)
def test_an_image_that_cannot_be_used_is_named_by_its_row(tmp_path, storage, image, text):
    good = {"bytes": png((8, 8)), "path": None}
    table = pa.table({"image": [good, good, good, image, good, good], "label": [0, 1, 0, 1, 0, 1]})
    parquet.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(ek.DataError, match=text) as caught:
        ek.load_data(HuggingFace(path=tmp_path, storage=storage, test_fraction=0.4), 0)
    assert 'split "train" row 3' in caught.value.problem
    if image and image["bytes"] == png((9, 8)):
        assert ek.load_data(HuggingFace(path=tmp_path, storage=storage, size=8), 0).info.input_shape == (3, 8, 8)


def test_several_data_sets_in_one_folder_are_not_mixed(folders, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(folders["parquet"] / "data", tmp_path / name)
    with pytest.raises(ek.DataError, match=r"several data sets: a, b"):
        HuggingFace(path=tmp_path).load(seed=0)


def test_names_in_a_folder_never_lead_out_of_it(changed):
    folder = changed("arrow")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["../single"]}))
    with pytest.raises(ek.DataError, match="refused"):
        HuggingFace(path=folder).load(seed=0)


@pytest.mark.parametrize(("name", "pattern"), [("arrow", "train/*.arrow"), ("parquet", "data/train-00001*")])
def test_a_damaged_file_is_named(changed, name, pattern):
    folder = changed(name)
    (file,) = folder.glob(pattern)
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"", content[:200] + b"\xff" * 400 + content[600:]):
        file.write_bytes(damaged)
        with pytest.raises(ek.DataError, match=r"not a valid|cannot decode|holds|expected|no column") as caught:
            HuggingFace(path=folder).load(seed=0)
        assert str(folder) in caught.value.where


def test_a_row_without_a_label_is_named(tmp_path):
    labels = Dataset.from_dict(
        {"x": [0.0, 1.0, 2.0, 3.0], "label": [0, 1, -1, 0]},
        features=Features({"x": Value("float32"), "label": ClassLabel(names=["a", "b"])}),
    )
    labels.save_to_disk(tmp_path / "data")
    with pytest.raises(ek.DataError, match=r'"label" is -1, expected 0 to 1(.|\n)*split "train" row 2'):
        HuggingFace(path=tmp_path / "data").load(seed=0)


def test_a_column_of_parquet_files_that_exceeds_the_memory_is_refused(folders, monkeypatch):
    monkeypatch.setattr(arrow_splits, "memory_limit", lambda: 500)
    with pytest.raises(ek.DataError, match=r"half of the memory(.|\n)*save_to_disk"):
        HuggingFace(path=folders["parquet"], storage="stream").load(seed=0)


def test_images_that_exceed_the_memory_are_refused_if_they_are_to_be_kept_there(folders, monkeypatch):
    monkeypatch.setattr(folder_loading, "memory_limit", lambda: 1000)
    with pytest.raises(ek.DataError, match=r"decoded images take(.|\n)*stream"):
        HuggingFace(path=folders["arrow"], storage="memory").load(seed=0)


def test_without_pyarrow_the_extra_is_named(folders, monkeypatch):
    monkeypatch.setattr(arrow_splits, "find_spec", lambda name: None)
    with pytest.raises(ek.DataError, match=r"pip install 'ensemblekit\[parquet\]'"):
        HuggingFace(path=folders["arrow"]).load(seed=0)


@pytest.mark.parametrize("inputs", ["images", "numbers"])
def test_a_run_predicts_new_files(folders, tmp_path, inputs):
    data = {"name": "huggingface", "path": str(folders["arrow"])}
    if inputs == "images":
        Image.new("RGB", (8, 8)).save(tmp_path / "new.png")
    else:
        data["features"] = ["width", "embedding"]
        (tmp_path / "new.csv").write_text("embedding[1],embedding[0],width\n1,2,3\n")
    spec = {"data": data, "model": {"name": "mlp", "hidden": [4]}, "training": {"epochs": 1}}
    ek.train(spec | {"engine": {"name": "sequential"}}, tmp_path / "run", progress=False)
    file = next(tmp_path.glob("new.*"))
    result = CliRunner().invoke(main, ["predict", str(tmp_path / "run"), str(file), "--json"])
    assert result.exit_code == 0, result.output
    assert '"cat"' in result.output or '"dog"' in result.output


@pytest.mark.contract
@pytest.mark.parametrize("features", [(), ("width", "embedding")])
def test_a_folder_passes_the_whole_contract(folders, features):
    results = run_contract(HuggingFace(path=folders["arrow"], features=features).named("huggingface"))
    assert [f"{result.name}\n{result.message}" for result in results if not result.passed] == []
