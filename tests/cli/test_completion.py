"""Shell completion, through click's own protocol."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from ensemblekit.cli import main
from ensemblekit.core.parameters import parameters
from ensemblekit.core.plugin import Plugin
from ensemblekit.core.registry import discover
from ensemblekit.spec.keys import field_names


def complete(line: str) -> list[tuple[str, str]]:
    """What bash gets for a line with the cursor at its end: pairs of a type (plain, file, dir) and a value."""
    words = line.split(" ")
    variables = {"_ENSEMBLEKIT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(main, [], env=variables)
    assert result.exit_code == 0, result.output
    return [tuple(answer.split(",", 1)) for answer in result.output.split()]


def values(line: str) -> list[str]:
    return [value for _, value in complete(line)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ensemblekit tr", ["train"]),
        ("ensemblekit specs ", ["copy", "show"]),
        ("ensemblekit list me", ["methods", "metrics"]),
        ("ensemblekit inspect gn", ["gncl"]),
        (
            "ensemblekit inspect trai",
            ["training", "training.loss", "training.optimizer", "training.schedule", "training.mix"],
        ),
        ("ensemblekit inspect loss:m", ["loss:mse"]),
        ("ensemblekit inspect --kind loss m", ["mse"]),
        ("ensemblekit inspect gncl --kind me", ["method", "metric"]),
        ("ensemblekit check ensemble", ["ensemblekit", "ensemble"]),
        ("ensemblekit check gncl --set la", ["lambda="]),
        ("ensemblekit check nothing --set la", []),
        ("ensemblekit new x --kind da", ["dataset"]),
        ("ensemblekit specs copy digi", ["digits"]),
        ("ensemblekit train cifar100/gn", ["cifar100/gncl", "cifar100/gncl_exact", "cifar100/gn"]),
        ("ensemblekit train digits --set method.l", ["method.lambda="]),
        ("ensemblekit train stacking --set method.f", ["method.form="]),
        ("ensemblekit train digits --set training.optimizer.", ["eps=", "lr=", "name="]),
        ("ensemblekit train digits --set model.h", ["model.hidden="]),
        ("ensemblekit train digits --set training.ep", ["training.epochs="]),
        ("ensemblekit train digits --set data.valid", ["data.validation_fraction="]),
        ("ensemblekit validate nothing.toml --set engine.d", ["engine.device="]),
        ("ensemblekit train digits --device c", ["cpu", "cuda"]),
        ("ensemblekit evaluate runs/x --data cifar", ["cifar10", "cifar100"]),
        ("ensemblekit bench --only tiny-1", ["tiny-16"]),
    ],
)
def test_tab_completes(line, expected):
    prefix = "training.optimizer." if line.endswith("training.optimizer.") else ""
    assert values(line) == [f"{prefix}{value}" for value in expected]


def test_specs_runs_and_plugin_files_are_also_completed_as_paths():
    assert ("file", "my") in complete("ensemblekit train my")
    assert ("file", "my") in complete("ensemblekit check my")
    assert complete("ensemblekit train digits --plugin my") == [("file", "my")]
    assert complete("ensemblekit resume ru") == [("dir", "ru")]
    assert complete("ensemblekit train digits --out ru") == [("dir", "ru")]


@pytest.mark.parametrize("info", [info for info in discover() if info.kind != "extension"], ids=lambda info: info.name)
def test_the_keys_that_are_read_from_source_are_the_parameters_of_the_class(info):
    plugin: type[Plugin] = info.load()
    assert set(field_names(info.target)) == {parameter.name for parameter in parameters(plugin)}


def test_completing_keys_and_plugins_imports_neither_torch_nor_pydantic():
    code = (
        "import sys, ensemblekit.cli\n"
        "try: ensemblekit.cli.main([], prog_name='ensemblekit')\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "slow = {'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    line = "ensemblekit train digits --set method.l"
    variables = {"_ENSEMBLEKIT_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": "4"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "plain,method.lambda=\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_each_shell_is_printed(shell):
    result = CliRunner().invoke(main, [], env={"_ENSEMBLEKIT_COMPLETE": f"{shell}_source"})
    assert (result.exit_code, "_ENSEMBLEKIT_COMPLETE=" in result.output) == (0, True)
