"""`ensemblekit new`: packages that install, pass their tests and train as they are, and what it refuses to make."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import Result
from helpers import commands
from helpers.environments import environment_variables, new_environment
from helpers.places import ROOT

import ensemblekit as ek
from ensemblekit.core.kinds import KINDS
from ensemblekit.scaffold.names import Names

TEMPLATED = [kind.name for kind in KINDS.values() if kind.template]

EXAMPLES = {kind: f"ekexample-new-{kind}" for kind in TEMPLATED}
TEMPLATES = sorted((ROOT / "ensemblekit" / "scaffold" / "templates").rglob("*.template"))


def run(*arguments: str) -> Result:
    return commands.run("new", *arguments)


def refusal(*arguments: str) -> str:
    """What `ensemblekit new` says when it refuses; the last line on standard error."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr.splitlines()[-1]


def printed_line(kind: str, parent: Path, monkeypatch) -> str:
    """Make a package; returns the last line that `new` prints."""
    monkeypatch.chdir(parent)
    made = run(EXAMPLES[kind], "--kind", kind)
    assert made.exit_code == 0, made.stderr
    return made.stdout.splitlines()[-1].strip()


def assert_promise_kept(kind: str, parent: Path) -> None:
    """The one run in the folder is as accurate as the spec of the package says."""
    (result,) = parent.glob("runs/*/result.json")
    (promise,) = re.findall(r"more than (\d+) %", (parent / EXAMPLES[kind] / "spec.toml").read_text())
    assert json.loads(result.read_text())["metrics"]["test_accuracy"] > int(promise) / 100, kind


def test_a_new_package_installs_passes_its_tests_and_trains_by_the_line_that_is_printed(tmp_path):
    name = EXAMPLES["method"]
    options = {"cwd": tmp_path, "env": environment_variables(new_environment(tmp_path / "environment")), "text": True}
    made = subprocess.run(["ensemblekit", "new", name], stdout=subprocess.PIPE, check=True, **options)
    line = made.stdout.splitlines()[-1].strip()
    assert line == f"pip install -e {name} && pytest {name} && ensemblekit train {name}/spec.toml"
    outcome = subprocess.run(line, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert outcome.returncode == 0, outcome.stdout
    assert f"Successfully installed {name}-0.1.0" in outcome.stdout
    assert re.search(r"\d+ passed", outcome.stdout)
    assert_promise_kept("method", tmp_path)


BUILD_EACH = """
import os, sys
from setuptools.build_meta import build_editable
for folder in sys.argv[2:]:
    child = os.fork()
    if not child:
        os.chdir(folder)
        build_editable(sys.argv[1])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""
"""What `pip install -e` asks setuptools for, without three imports of setuptools for each package."""
TRAIN_EACH = """
import contextlib, sys
from ensemblekit.cli import main
for folder, name in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        with contextlib.chdir(folder):
            main(["train", f"{name}/spec.toml"])
    except SystemExit as ended:
        if ended.code:
            raise
"""


def test_packages_of_all_other_kinds_install_pass_their_tests_and_train(tmp_path, monkeypatch):
    """The three commands of the printed line, each in one process for all kinds: most of the time is torch's import."""
    folders = {kind: tmp_path / kind for kind in TEMPLATED if kind != "method"}
    for kind, folder in folders.items():
        folder.mkdir()
        name = EXAMPLES[kind]
        line = f"pip install -e {name} && pytest {name} && ensemblekit train {name}/spec.toml"
        assert printed_line(kind, folder, monkeypatch) == line
    packages = {kind: f"{kind}/{EXAMPLES[kind]}" for kind in folders}
    home = new_environment(tmp_path / "environment")

    def output(*command: str) -> str:
        options = {"cwd": tmp_path, "env": environment_variables(home), "text": True}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        assert done.returncode == 0, done.stdout
        return done.stdout

    output("python", "-P", "-c", BUILD_EACH, str(tmp_path), *packages.values())
    installed = output("pip", "install", *(path.name for path in tmp_path.glob("*.whl")))
    tested = output("pytest", "-v", *packages.values())
    output("python", "-P", "-c", TRAIN_EACH, *(part for kind in folders for part in (kind, EXAMPLES[kind])))
    for kind in packages:
        assert f" {EXAMPLES[kind]}-0.1.0" in installed.rpartition("Successfully installed")[2]
        assert re.search(rf"/tests/test_{EXAMPLES[kind].replace('-', '_')}.py::.+ PASSED", tested), tested
        assert_promise_kept(kind, folders[kind])
    lines = (folders["extension"] / "runs" / "ekexample_new_extension.csv").read_text().splitlines()
    assert lines[0] == "epoch,metric,value"
    assert [line.split(",")[0] for line in lines if ",test_accuracy," in line] == [str(epoch) for epoch in range(1, 11)]


@pytest.mark.parametrize("kind", TEMPLATED)
def test_a_new_package_is_documented_and_clean_by_the_projects_own_rules(kind, tmp_path):
    made = json.loads(run("soft-min", "--kind", kind, "--dir", str(tmp_path), "--json").stdout)
    package = Path(made["directory"])
    assert package == tmp_path / "soft-min"
    assert sorted(made["files"]) == sorted(str(path) for path in package.rglob("*") if path.is_file())
    for settings in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *settings, "--config", str(ROOT / "pyproject.toml"), "--no-cache", "."]
        subprocess.run(command, cwd=package, check=True)
    header = (package / "spec.toml").read_text().split("\n\n")[0].splitlines()
    assert header[0].startswith("# SoftMin")
    assert header[1] == "# Run:     ensemblekit train soft-min/spec.toml"
    assert [line[:11] for line in header[2:4]] == ["# Needs:   ", "# Expect:  "]
    readme = (package / "README.md").read_text()
    assert all(f"| {verb} it | `" in readme for verb in ("install", "train", "test", "publish"))
    assert "`ensemblekit check soft_min`" in readme
    assert not any(str(tmp_path) in Path(file).read_text() for file in made["files"])


@pytest.mark.parametrize("kind", TEMPLATED)
def test_the_entry_point_is_in_the_group_of_the_kind(kind, tmp_path):
    assert run("SoftMin", "--kind", kind, "--dir", str(tmp_path)).exit_code == 0
    project = tomllib.loads((tmp_path / "SoftMin" / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("soft-min", "0.1.0")
    assert project["entry-points"] == {KINDS[kind].group: {"soft_min": "soft_min:SoftMin"}}
    assert project["dependencies"] == [f"ensemblekit>={ek.__version__}"]
    assert project["optional-dependencies"]["dev"] == ["pytest>=8"]
    assert not {"authors", "license"} & set(project)


def test_every_kind_of_the_command_has_its_templates():
    assert {path.parent.name for path in TEMPLATES} == {"common", *TEMPLATED}


@pytest.mark.parametrize(
    ("name", "package", "distribution", "class_name"),
    [
        ("soft-min", "soft_min", "soft-min", "SoftMin"),
        ("soft_min", "soft_min", "soft-min", "SoftMin"),
        ("SoftMin", "soft_min", "soft-min", "SoftMin"),
        ("softMin", "soft_min", "soft-min", "SoftMin"),
        ("SOFT-MIN", "soft_min", "soft-min", "SoftMin"),
        ("XYZNet2", "xyz_net2", "xyz-net2", "XYZNet2"),
        ("x", "x", "x", "X"),
    ],
)
def test_all_names_are_derived_from_one(name, package, distribution, class_name):
    names = Names.of(name)
    assert (names.package, names.distribution, names.class_name) == (package, distribution, class_name)


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("", "not a valid name of a package", "for example: soft-min"),
        ("soft min", "not a valid name of a package", "for example: soft-min"),
        ("2soft", "not a valid name of a package", "for example: soft"),
        ("soft--min", "not a valid name of a package", "for example: soft-min"),
        ("_soft", "not a valid name of a package", "for example: soft"),
        ("säft", "not a valid name of a package", "for example: saft"),
        ("..", "not a valid name of a package", "for example: soft-min"),
        ("soft\n", "not a valid name of a package", "for example: soft"),
        ("a/b/soft-min", "expected a name, got a path", "ensemblekit new soft-min --dir a/b"),
        ("/soft-min", "expected a name, got a path", "ensemblekit new soft-min --dir /"),
        ("../soft-min", "expected a name, got a path", "ensemblekit new soft-min --dir .."),
        ("soft-min/", "expected a name, got a path", "ensemblekit new soft-min --dir ."),
        ("a\\soft-min", "expected a name, got a path", "ensemblekit new soft-min --dir a"),
        ("class", "a Python keyword", "for example: my-class"),
        ("none", "a Python keyword", "for example: my-none"),
        ("a-b", "the class would be AB, whose name in specs is ab", "use ab"),
        ("net-2x", "the class would be Net2x, whose name in specs is net2x", "use net2x"),
        ("random", "the name of a module of Python's standard library", "for example: random-method"),
        ("tomllib", "the name of a module of Python's standard library", "for example: tomllib-method"),
        ("torch", "the name of an installed module", "for example: torch-method"),
        ("ensemblekit", "the name of an installed module", "for example: ensemblekit-method"),
        ("scikit-learn", "installing it would replace scikit-learn", "for example: scikit-learn-method"),
        ("method", "the class would shadow Method, which its file imports", "for example: method-method"),
        ("gncl", 'a method "gncl" already exists; registered by ensemblekit', "for example: gncl-method"),
        ("GNCL", 'a method "gncl" already exists; registered by ensemblekit', "for example: gncl-method"),
    ],
)
def test_a_bad_or_taken_name_is_refused_with_a_way_out_and_nothing_is_made(name, what, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal(name)
    assert message.startswith(f"error: {what}")
    assert fix in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "kind"), [("digits", "dataset"), ("mlp", "model")])
def test_a_name_is_taken_among_the_plugins_of_its_own_kind_only(name, kind, tmp_path):
    assert f'a {kind} "{name}" already exists' in refusal(name, "--kind", kind, "--dir", str(tmp_path))
    assert run(name, "--kind", "method", "--dir", str(tmp_path)).exit_code == 0


def test_a_directory_that_is_not_empty_is_refused_and_keeps_what_it_has(tmp_path):
    (tmp_path / "soft-min").mkdir()
    (tmp_path / "soft-min" / "thesis.txt").write_text("years of work")
    message = refusal("soft-min", "--dir", str(tmp_path))
    assert message.startswith(f"error: the directory is not empty; {tmp_path / 'soft-min'}; ")
    assert [path.name for path in tmp_path.rglob("*")] == ["soft-min", "thesis.txt"]


def test_a_file_of_that_name_is_refused_and_kept(tmp_path):
    (tmp_path / "soft-min").write_text("years of work")
    assert "a file has this name" in refusal("soft-min", "--dir", str(tmp_path))
    assert (tmp_path / "soft-min").read_text() == "years of work"


def test_an_empty_directory_is_filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as for python -m ensemblekit, which could then import the directory
    (tmp_path / "soft_min").mkdir()
    assert run("soft_min").exit_code == 0
    assert (tmp_path / "soft_min" / "src" / "soft_min" / "__init__.py").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["soft_min"]


def test_a_place_that_does_not_exist_is_made_and_one_with_a_space_is_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("soft-min", "--dir", "my plugins/new").stdout.splitlines()[-1].strip() == (
        "pip install -e 'my plugins/new/soft-min' && pytest 'my plugins/new/soft-min' "
        "&& ensemblekit train 'my plugins/new/soft-min/spec.toml'"
    )
    assert (tmp_path / "my plugins" / "new" / "soft-min" / "spec.toml").is_file()


def test_a_place_that_is_a_file_is_an_error_without_a_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("soft-min", "--dir", str(tmp_path / "file"))
    assert result.exit_code == 5
    assert result.stderr.startswith("error: cannot write: ")


def test_a_failure_half_way_leaves_nothing_behind(tmp_path, monkeypatch):
    written = []

    def write_two(path: Path, content: str, **options: str) -> None:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)

    monkeypatch.setattr(Path, "write_text", write_two)
    result = run("soft-min", "--dir", str(tmp_path))
    assert result.exit_code == 7
    assert "disk full" in result.stderr
    assert len(written) == 2
    assert not list(tmp_path.iterdir())
