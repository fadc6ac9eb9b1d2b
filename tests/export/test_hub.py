"""A model folder is the ensemble: it predicts the same bits, needs no run, and never loads what is not intact."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers import tiny_runs
from helpers.model_folders import SPEC, samples, train
from helpers.run_edits import edit_json
from torch import nn

import ensemblekit as ek
from ensemblekit.cli import main
from ensemblekit.core.errors import PluginError, RunError, UsageError

FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "run"
    train(path)
    return path


@pytest.fixture(scope="module")
def exported(run) -> Path:
    return ek.export(run, "hub", run.with_name("folder"), licence="MIT").path


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "folder"))


def test_a_folder_predicts_the_same_bits_without_its_run(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    inputs, _ = samples(seed=1)
    original = ek.load(copy)
    expected = original.member_outputs(inputs), original.predict_proba(inputs), original.predict_sets(inputs)
    folder = ek.export(copy, "hub", tmp_path / "folder").path
    shutil.rmtree(copy)
    loaded = ek.load(folder)
    assert sorted(file.name for file in folder.iterdir()) == FILES
    assert torch.equal(loaded.member_outputs(inputs), expected[0])
    assert torch.equal(loaded.predict_proba(inputs), expected[1])
    assert loaded.predict_sets(inputs) == expected[2]
    assert loaded.calibration is not None
    assert loaded.classes == original.classes


def test_a_folder_prepares_images_as_the_run_does(tmp_path):
    tiny_runs.train(tmp_path / "run")
    folder = ek.export(tmp_path / "run", "hub").path
    assert folder == tmp_path / "run" / "hub"
    images = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(ek.load(folder)(images), ek.load(tmp_path / "run")(images))


def test_predict_takes_a_folder(run, exported, tmp_path):
    table = tmp_path / "new.csv"
    table.write_text("a,b,c\n1,2,3\n0,-1,0.5\n")
    of_run, of_folder = (
        CliRunner().invoke(main, ["predict", str(path), str(table), "--probabilities"]) for path in (run, exported)
    )
    assert of_folder.exit_code == 0
    assert of_folder.stdout == of_run.stdout
    assert of_folder.stdout.count(str(table)) == 2


def test_the_command_says_what_it_wrote_and_keeps_what_is_there(run, tmp_path):
    command = ["export", str(run), "--format", "hub", "--output", str(tmp_path / "folder"), "--licence", "MIT"]
    result = CliRunner().invoke(main, [*command, "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["files"] == FILES
    (tmp_path / "folder" / "README.md").write_text("edited")
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 5
    assert "not empty" in again.stderr
    assert (tmp_path / "folder" / "README.md").read_text() == "edited"
    refused = CliRunner().invoke(main, ["export", str(run), "--format", "hub", "--input-type", "uint8"])
    assert refused.exit_code == 2


def test_a_damaged_run_leaves_no_folder(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    flip(copy / "model.safetensors")
    with pytest.raises(RunError, match="checksum mismatch"):
        ek.export(copy, "hub", tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", [flip, lambda file: file.write_bytes(file.read_bytes()[:-7]), Path.unlink])
def test_a_damaged_file_is_refused_by_name(folder, name, damage):
    damage(folder / name)
    with pytest.raises(RunError) as refused:
        ek.load(folder)
    assert refused.value.exit_code == 5
    assert name in str(refused.value) or not (folder / name).exists()


def test_every_edit_of_the_configuration_is_noticed(folder):
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for key in values:
        file.write_text(json.dumps({**values, key: "changed"}, indent=2) + "\n")
        with pytest.raises(RunError):
            ek.load(folder)


def test_the_card_may_be_edited(folder):
    (folder / "README.md").write_text("mine")
    assert ek.load(folder).classes


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_in_place_of_a_file_is_refused(folder, name, tmp_path):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(RunError, match="symbolic link, which is never followed"):
        ek.load(folder)


class Canary:
    """Executes something when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_pickle_in_place_of_the_weights_is_refused_unread(folder, tmp_path):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    with pytest.raises(RunError, match="refused: not a safetensors file"):
        ek.load(folder)
    assert not (tmp_path / "canary").exists()


def test_a_forged_folder_can_name_only_installed_plugins(folder, tmp_path, monkeypatch):
    (tmp_path / "canary.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    edit_json(
        folder / "config.json", lambda values: values.update(spec=values["spec"].replace('"mlp"', '"canary:Net"'))
    )
    with pytest.raises(PluginError, match="canary:Net"):
        ek.load(folder)


def test_a_newer_format_and_another_library_are_told_apart(folder):
    edit_json(folder / "config.json", lambda values: values.update(format_version=2))
    with pytest.raises(RunError, match="newer version") as newer:
        ek.load(folder)
    assert newer.value.fix == "upgrade ensemblekit"
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(RunError, match="not a model folder of ensemblekit"):
        ek.load(folder)


def test_a_verb_that_needs_a_run_says_what_a_folder_is(exported):
    with pytest.raises(RunError, match="a model folder, not a run"):
        ek.open_run(exported)


def test_a_plugin_in_a_file_is_named_and_passed_again(tmp_path):
    plugin = tmp_path / "secret" / "halved.py"
    plugin.parent.mkdir()
    plugin.write_text(
        "from ensemblekit import Method, hookimpl\n\n\nclass Halved(Method):\n    @hookimpl\n"
        "    def member_loss(self, outputs, target, loss):\n        return loss(outputs, target) / 2\n"
    )
    ek.train({**tiny_runs.SPEC, "method": "halved"}, tmp_path / "run", progress=False, plugins=[plugin])
    exported = ek.export(tmp_path / "run", "hub", plugins=[plugin])
    assert 'plugins=["halved.py"]' in exported.usage
    assert "halved.py is not part of the folder: publish it as well" in exported.notes
    for file in exported.path.iterdir():
        assert b"secret" not in file.read_bytes()
    with pytest.raises(PluginError, match="halved"):
        ek.load(exported.path)
    assert len(ek.load(exported.path, plugins=[plugin]).members) == 2


class Net(nn.Module):
    def __init__(self, input_shape, num_outputs):
        super().__init__()
        self.linear = nn.Linear(input_shape[0], num_outputs)

    def forward(self, inputs):
        return self.linear(inputs)


def test_a_model_from_python_is_passed_again(tmp_path):
    spec = {key: value for key, value in SPEC.items() if key != "model"}
    ek.train(spec, tmp_path / "run", progress=False, data=samples(), model=Net)
    folder = ek.export(tmp_path / "run", "hub", model=Net).path
    inputs, _ = samples(seed=1)
    assert torch.equal(ek.load(folder, model=Net)(inputs), ek.load(tmp_path / "run", model=Net)(inputs))
    assert "model=MyNetwork" in (folder / "README.md").read_text()
    with pytest.raises(PluginError):
        ek.load(folder)


def test_a_model_that_reads_other_files_is_refused(tmp_path):
    tiny_runs.train(tmp_path / "first")
    groups = [{"members": 1}, {"members": 1, "model": {"name": "frozen", "run": str(tmp_path / "first")}}]
    spec = {**tiny_runs.SPEC, "ensemble": {"groups": groups}, "method": "independent"}
    ek.train(spec, tmp_path / "second", progress=False)
    with pytest.raises(UsageError, match="reads files that a folder cannot hold"):
        ek.export(tmp_path / "second", "hub")


def test_no_directory_of_this_machine_is_published(tmp_path):
    inputs, names = samples()
    table = tmp_path / "secret" / "table.csv"
    table.parent.mkdir()
    rows = [f"{a},{b},{c},{len(name)}x" for (a, b, c), name in zip(inputs, names, strict=True)]
    table.write_text("\n".join(["a,b,c,label", *rows]))
    spec = {**SPEC, "data": {"name": "table", "path": str(table), "target": "label"}}
    ek.train(spec, tmp_path / "run", progress=False)
    exported = ek.export(tmp_path / "run", "hub", tmp_path / "folder")
    table.unlink()
    assert exported.notes == ("paths are shortened to names: table.csv",)
    for file in exported.path.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()
    assert "| columns | a, b, c |" in (exported.path / "README.md").read_text()
    new = tmp_path / "new.csv"
    new.write_text("c,a,b\n1,2,3\n")
    assert CliRunner().invoke(main, ["predict", str(exported.path), str(new)]).exit_code == 0
