"""The command specs, and shipped specs by name in train and validate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.commands import last_error, run
from helpers.places import ROOT

from ensemblekit.spec.shipped import find_spec, shipped_specs


@pytest.fixture(autouse=True)
def empty_directory(monkeypatch, tmp_path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_file_of_the_folder_specs_is_shipped():
    files = {path.relative_to(ROOT / "specs").with_suffix("").as_posix() for path in (ROOT / "specs").rglob("*.toml")}
    assert set(shipped_specs()) == files
    assert next(iter(shipped_specs())) == "cifar100"  # specs of the top folder come first
    assert find_spec("cifar100/gncl").samefile(ROOT / "specs" / "cifar100" / "gncl.toml")


def test_specs_lists_name_plugins_and_purpose():
    header, *rows = run("specs").stdout.splitlines()
    assert header.split("  ")[0] == "name"
    assert [row.split()[0] for row in rows] == list(shipped_specs())
    assert any(row.startswith("digits ") and row.endswith(" digits, gncl, mlp") for row in rows)
    (digits,) = [spec for spec in json.loads(run("specs", "--json").stdout) if spec["name"] == "digits"]
    assert digits == {
        "name": "digits",
        "purpose": "Quick start: 8 small networks on handwritten digits, trained by GNCL.",
        "data": "digits",
        "method": "gncl",
        "model": "mlp",
    }


def test_show_prints_the_file():
    assert run("specs", "show", "digits").stdout == (ROOT / "specs" / "digits.toml").read_text()


def test_copy_writes_a_spec_whose_header_names_the_copy_and_says_the_next_command(tmp_path):
    result = run("specs", "copy", "cifar100/gncl")
    assert result.stdout == "wrote gncl.toml\nnext:\n  ensemblekit train gncl.toml\n"
    original = (ROOT / "specs" / "cifar100" / "gncl.toml").read_text()
    expected = original.replace("train specs/cifar100/gncl.toml", "train gncl.toml")
    assert (tmp_path / "gncl.toml").read_text() == expected
    assert run("validate", "gncl.toml").exit_code == 0
    named = json.loads(run("specs", "copy", "digits", "--output", "my run.toml", "--json").stdout)
    assert named == {"path": "my run.toml", "next": "ensemblekit train 'my run.toml'"}


def test_the_copy_of_a_sweep_is_swept(tmp_path):
    result = run("specs", "copy", "reproduction/exact_gncl")
    assert result.stdout == "wrote exact_gncl.toml\nnext:\n  ensemblekit sweep exact_gncl.toml\n"
    header = (tmp_path / "exact_gncl.toml").read_text()
    assert "# Run:     ensemblekit sweep exact_gncl.toml --jobs 2 --out sweeps/exact_gncl\n" in header
    assert run("validate", "exact_gncl.toml").exit_code == 0
    assert "36, all valid" in run("validate", "reproduction/exact_gncl").stdout


def test_copy_never_overwrites_a_file(tmp_path):
    (tmp_path / "digits.toml").write_text("mine")
    result = run("specs", "copy", "digits")
    assert result.exit_code == 2
    assert last_error(result) == "error: the file already exists; digits.toml; name another file with --output"
    assert (tmp_path / "digits.toml").read_text() == "mine"
    assert "cannot be written" in last_error(run("specs", "copy", "digits", "--output", "nowhere/x.toml"))


@pytest.mark.parametrize("verb", ["copy", "show"])
def test_an_unknown_spec_gets_a_suggestion(verb):
    result = run("specs", verb, "digitz")
    assert result.exit_code == 2
    fix = 'did you mean "digits"? ensemblekit specs lists the shipped specs'
    assert last_error(result) == f'error: no shipped spec "digitz"; {fix}'


def test_a_shipped_spec_is_validated_by_its_name_and_a_file_of_that_name_comes_first(tmp_path):
    assert json.loads(run("validate", "digits", "--json").stdout)["spec"]["data"]["name"] == "digits"
    (tmp_path / "digits").write_text('[data]\nname = "diabetes"\n[model]\nname = "mlp"\n[training]\nloss = "mse"\n')
    assert json.loads(run("validate", "digits", "--json").stdout)["spec"]["data"]["name"] == "diabetes"


@pytest.mark.parametrize("verb", ["train", "validate"])
@pytest.mark.parametrize("name", ["digitz", "specs/digits.toml", "digitz.toml"])
def test_neither_a_file_nor_a_shipped_spec_gets_a_suggestion(verb, name, tmp_path):
    result = run(verb, name)
    assert result.exit_code == 2
    fix = 'did you mean "digits"? ensemblekit specs lists the shipped specs'
    assert last_error(result) == f"error: neither a file nor a shipped spec; {name}; {fix}"
    assert not list(tmp_path.iterdir())


def test_a_spec_that_does_not_exist_is_a_problem_in_json_too():
    report = json.loads(run("validate", "nothing.toml", "--json").stdout)
    assert (report["valid"], report["problems"][0]["what"]) == (False, "neither a file nor a shipped spec")
