"""What the command line does with standard streams that are closed, full or read by nobody: real processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import last_error, run
from helpers.places import TOY_PLUGINS

import ensemblekit as ek

COMMAND = f"{sys.executable} -m ensemblekit"
TOY_SPEC = '[data]\nname = "blobs"\n[model]\nname = "linear"\n[ensemble]\nmembers = 2\n[training]\nepochs = 1\n'


def shell(command: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, **options)


@pytest.mark.parametrize("arguments", ["list losses", "specs show digits", "list --help", "--help"])
def test_a_full_standard_output_ends_with_exit_7_and_one_line(arguments):
    result = shell(f"{COMMAND} {arguments} > /dev/full")
    assert result.returncode == 7
    assert result.stderr.startswith("error: cannot write: No space left on device; standard output; ")
    assert len(result.stderr.splitlines()) == 1


def test_closed_streams_end_with_an_exit_code_and_no_traceback():
    result = shell(f"{COMMAND} list losses >&-")
    assert (result.returncode, len(result.stderr.splitlines())) == (7, 1)
    assert shell(f"{COMMAND} list losses 2>&- <&-").returncode == 0
    lost = shell(f"{COMMAND} validate nothing.toml 2>&-")
    assert (lost.returncode, lost.stdout) == (2, "")  # the error must not end up in the data
    assert shell(f"{COMMAND} list losses >&- 2>&- <&-").returncode == 7


@pytest.mark.parametrize("arguments", ["schema", "list --help", "--help"])
def test_a_reader_that_stops_early_is_no_error(arguments):
    result = shell(f"{COMMAND} {arguments} | head -1; exit ${{PIPESTATUS[0]}}")
    assert (result.returncode, result.stderr, len(result.stdout.splitlines())) == (0, "", 1)


def test_a_run_is_not_hurt_by_a_full_standard_output_in_ascii(tmp_path):
    (tmp_path / "toy.toml").write_text(TOY_SPEC)
    command = f"{COMMAND} train toy.toml --plugin {TOY_PLUGINS} --out"
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    result = shell(f"{command} {tmp_path}/$'r\\xff' > /dev/full", cwd=tmp_path, env=ascii_only)
    assert result.returncode == 0
    assert "warning: standard output cannot be written: No space left on device" in result.stderr
    finished = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff"))
    assert ek.open_run(finished, plugins=[TOY_PLUGINS]).metrics
    assert ek.load(finished, plugins=[TOY_PLUGINS]).members  # safetensors itself opens only names in UTF-8


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "{}"),
        ("train", "digits", "--out", "{}"),
        ("resume", "{}"),
        ("evaluate", "{}"),
        ("check", "{}.py"),
        ("list", "--plugin", "{}.py"),
        ("specs", "copy", "digits", "--output", "{}.toml"),
        ("new", "x{}"),
    ],
    ids=" ".join,
)
def test_a_name_that_is_too_long_is_said_to_be(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*(argument.format("a" * 300) for argument in arguments))
    assert result.exit_code in (2, 5)
    assert "report" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_too_little_address_space_says_what_is_needed():
    gib = 2**30
    result = subprocess.run(
        [sys.executable, "-m", "ensemblekit", "validate", "digits"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (gib // 2, gib // 2)),
    )
    assert result.returncode == 7
    line = "error: not enough memory to import torch; the limit of 0.5 GiB; raise it to 4 GiB or more (ulimit -v)"
    assert result.stderr.splitlines() == [line]


def test_an_interrupted_command_says_what_to_do(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ensemblekit.core.registry.discover", interrupt)
    result = run("plugins")
    assert result.exit_code == 130
    assert last_error(result) == "error: interrupted; ensemblekit plugins; run the command again"
