"""The command `check`: what it takes, what it prints, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from helpers import commands
from helpers.commands import last_error

import ensemblekit as ek
from ensemblekit.core.registry import PluginInfo, Registry, discover

GOOD = '''\
from pydantic import Field
from ensemblekit import Loss


class Huge(Loss):
    """The squared error, enlarged."""

    takes = "values"
    factor: float = Field({default}gt=0, description="by how much")

    def prepare(self, outputs, target):
        return target.to(outputs.dtype)

    def per_sample(self, outputs, target):
        return self.factor * (outputs - target).square().sum(dim=-1)
'''
BAD = GOOD.replace('"""The squared error, enlarged."""', '"""The squared error"""')


def run(*arguments: str) -> Result:
    return commands.run("check", *arguments)


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, default: str = "2.0, ") -> str:
        (tmp_path / "own.py").write_text(text.format(default=default))
        return str(tmp_path / "own.py")

    return write_file


def test_an_installed_plugin_by_its_name_is_a_table_of_passed_checks():
    result = run("cross_entropy")
    assert result.exit_code == 0, result.stderr
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["plugin", "check", "result"]
    assert all(row.startswith("cross_entropy  ") and row.endswith("  ok") for row in rows)
    assert any("its description is one sentence" in row for row in rows)


def test_a_plugin_that_breaks_its_contract_is_reviewed_and_ends_with_4(write):
    file = write(BAD)
    result = run(file)
    assert result.exit_code == 4
    assert 'got: "The squared error"; look at: Huge, ' in result.stdout
    assert last_error(result).startswith("error: 1 of ")
    assert last_error(result).endswith(" checks failed; huge; see the results above")


def test_json_has_one_object_for_each_check(write):
    rows = json.loads(run(write(BAD), "--json").stdout)
    assert {tuple(row) for row in rows} == {("plugin", "kind", "package", "check", "passed", "message", "seconds")}
    assert [row["check"] for row in rows if not row["passed"]] == ["its description is one sentence"]
    assert {row["kind"] for row in rows} == {"loss"}


def test_parameters_are_given_with_set_and_asked_for_when_they_are_required(write):
    file = write(GOOD, default="")
    missing = run(file)
    assert (missing.exit_code, last_error(missing)) == (
        2,
        'error: loss "huge" needs --set factor=…; add it, so that it can be checked',
    )
    assert run(file, "--set", "factor=3").exit_code == 0
    wrong = run(file, "--set", "factor=-3")
    assert wrong.exit_code == 2
    assert "loss.factor: -3" in last_error(wrong)


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("gnkl", ('there is no plugin and no package with plugins called "gnkl"', 'did you mean "gncl"?')),
        ("ensemblekid", ('did you mean "ensemblekit"?',)),
        ("metod:gncl", ('"metod" is not a kind of plugin', 'did you mean "method"?')),
        ("nothing.py", ("no such file", "nothing.py")),
    ],
)
def test_an_unknown_name_gets_a_suggestion(target, parts):
    result = run(target)
    assert result.exit_code == 2
    for part in parts:
        assert part in last_error(result)


def test_a_name_of_several_kinds_asks_which(monkeypatch):
    mse = discover().get("loss", "mse")
    twin = PluginInfo("method", "mse", "nowhere:MSE", "other", "1")
    monkeypatch.setattr("ensemblekit.testing.targets.discover", lambda: Registry([mse, twin]))
    result = run("mse")
    assert (result.exit_code, "add the kind: method:mse or --kind method" in last_error(result)) == (2, True)
    assert run("loss:mse").exit_code == 0
    assert run("mse", "--kind", "loss").exit_code == 0
    two = run("loss:mse", "--kind", "method")
    assert (two.exit_code, "two kinds: loss and method" in last_error(two)) == (2, True)


def test_a_name_that_its_kind_does_not_have_is_a_missing_plugin():
    result = run("model:gncl")
    assert result.exit_code == 4
    assert '"gncl" is not a registered model' in last_error(result)


def test_a_package_is_all_its_plugins_and_says_which_are_skipped(monkeypatch):
    kept = {"mse", "nll", "table", "given"}
    infos = [info for info in discover() if info.name in kept]
    broken = PluginInfo("loss", "gone", "nowhere:Gone", "ensemblekit", ek.__version__)
    monkeypatch.setattr("ensemblekit.testing.targets.discover", lambda: Registry([*infos, broken]))
    result = run("EnsembleKit", "--json")
    rows = json.loads(result.stdout)
    assert {row["plugin"] for row in rows} == kept | {"gone"}
    assert {row["plugin"]: row["message"] for row in rows if row["passed"] is None} == {
        "table": "it needs --set target=…",
        "given": "it needs in-memory data, from Python",
    }
    (import_row,) = [row for row in rows if row["passed"] is False]
    assert (import_row["plugin"], import_row["check"]) == ("gone", "it can be imported")
    assert result.exit_code == 4
    assert "skipped: it needs" in run("EnsembleKit").stdout
    several = run("ensemblekit", "--set", "a=1")
    assert (several.exit_code, "check one of them by its name" in last_error(several)) == (2, True)


def test_a_check_leaves_nothing_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("method:end_to_end").exit_code == 0
    assert list(Path.cwd().iterdir()) == []
