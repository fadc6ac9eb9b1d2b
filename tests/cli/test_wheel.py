"""The built wheel serves without the repository: data files are in it, and shipped specs can be listed and trained."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.environments import environment_variables, new_environment
from helpers.places import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: building leaves files beside the sources."""
    return built_wheel(tmp_path_factory.mktemp("wheel"), dict(os.environ))


def built_wheel(home: Path, environment: dict[str, str]) -> Path:
    source = home / "source"
    source.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in ("ensemblekit", "plugins", "specs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(home), str(source)]
    subprocess.run(command, check=True, env=environment)
    (built,) = home.glob("*.whl")
    return built


def test_specs_templates_workloads_and_type_marker_are_in_the_wheel(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    specs = {f"ensemblekit/spec/shipped_{path.relative_to(ROOT)}" for path in (ROOT / "specs").rglob("*.toml")}
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "ensemblekit" / "scaffold").rglob("*.template")}
    assert specs
    assert templates
    assert specs | templates | {"ensemblekit/py.typed", "ensemblekit/bench/workloads.toml"} <= packed


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_compiled_code_is_in_the_wheel(wheel):
    packed = zipfile.ZipFile(wheel).namelist()
    assert sum(name.startswith("ensemblekit/core/_kernels.") for name in packed) == 1


def test_a_wheel_is_built_without_a_compiler_too(tmp_path):
    path = built_wheel(tmp_path, {**os.environ, "CC": "/nowhere/cc"})
    assert not any(name.startswith("ensemblekit/core/_kernels.") for name in zipfile.ZipFile(path).namelist())


def test_an_installed_wheel_lists_copies_and_trains_shipped_specs(wheel, tmp_path):
    home = new_environment(tmp_path / "environment", editable=False)
    work = tmp_path / "work"
    work.mkdir()

    def run(command: str) -> str:
        options = {"cwd": work, "env": environment_variables(home), "check": True, "text": True}
        return subprocess.run(shlex.split(command), stdout=subprocess.PIPE, **options).stdout

    run(f"pip install --quiet --no-deps '{wheel}'")
    assert str(home) in run("python -c 'import ensemblekit.cli; print(ensemblekit.cli.__file__)'")
    specs = {spec["name"]: spec for spec in json.loads(run("ensemblekit specs --json"))}
    assert specs["digits"]["data"] == "digits"
    assert run("ensemblekit specs copy digits").splitlines()[-1].strip() == "ensemblekit train digits.toml"
    assert "# Run:     ensemblekit train digits.toml\n" in (work / "digits.toml").read_text()
    run("ensemblekit train digits --quiet --set training.epochs=1 --set ensemble.members=2 --set engine.name=stacked")
    assert (work / "runs" / "digits-1" / "model.safetensors").is_file()
