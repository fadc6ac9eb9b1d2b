"""The command report: where the page goes, what is printed, and what happens if it cannot be written."""

from __future__ import annotations

import errno
import json
import os

import click
import pytest
from helpers import tiny_runs
from helpers.commands import last_error, run

from ensemblekit.runs import atomic


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tiny_runs.train(tmp_path_factory.mktemp("report") / "run").path


def test_the_page_is_in_the_run_directory_unless_another_file_is_named(trained, tmp_path):
    result = run("report", str(trained))
    assert result.exit_code == 0, result.output
    page = trained / "report.html"
    assert str(page) in result.stdout
    named = tmp_path / "new" / "page.html"
    assert run("report", str(trained), "--output", str(named)).exit_code == 0
    assert named.read_bytes() == page.read_bytes()
    assert [entry.name for entry in named.parent.iterdir()] == ["page.html"]


def test_json_has_the_path_and_what_is_on_the_page(trained):
    answer = json.loads(run("report", str(trained), "--json").stdout)
    assert answer["path"] == str(trained / "report.html")
    assert answer["kind"] == "run"
    assert answer["num_bytes"] == os.path.getsize(answer["path"])
    assert "Reliability diagram" in answer["charts"]
    assert answer["sentence"].startswith("2 mlp members trained on digits")


def test_the_page_is_opened_on_request(trained, monkeypatch):
    opened = []
    monkeypatch.setattr(click, "launch", lambda address: opened.append(address))
    assert run("report", str(trained), "--open").exit_code == 0
    assert opened == [(trained / "report.html").resolve().as_uri()]


def test_a_full_disk_keeps_the_old_page(trained, tmp_path, monkeypatch):
    page = tmp_path / "report.html"
    page.write_text("old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic, "write_all", full)
    result = run("report", str(trained), "--output", str(page))
    assert result.exit_code == 7
    assert last_error(result).startswith("error: disk full")
    assert page.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_what_is_not_a_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        result = run("report", str(path))
        assert result.exit_code == 5
        assert str(path) in last_error(result)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_as_output_is_refused_before_anything_is_computed(trained, tmp_path):
    result = run("report", str(trained), "--output", str(tmp_path))
    assert result.exit_code == 2
    assert f"name a file: {tmp_path}/report.html" in last_error(result)


def test_damaged_outputs_are_reported(tmp_path):
    path = tiny_runs.train(tmp_path / "run").path
    file = path / "outputs.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = run("report", str(path))
    assert result.exit_code == 5
    assert "checksum mismatch" in last_error(result)
    assert not (path / "report.html").exists()
