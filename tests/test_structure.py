"""Claims about the project itself: how its files depend on each other, and that public names are documented."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.places import ROOT
from importlinter.cli import lint_imports_command

import ensemblekit

CORE = sorted(path for path in (ROOT / "ensemblekit").rglob("*.py") if path != ROOT / "ensemblekit" / "__init__.py")
PLUGIN_FILES = sorted((ROOT / "plugins").glob("*/*.py"))


def imports(path: Path) -> set[tuple[str, str]]:
    """(module, name) of every import of ensemblekit's that runs, wherever it stands; not those for type checkers."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in for_types:
            found |= {(node.module, alias.name) for alias in node.names}
        if isinstance(node, ast.Import) and id(node) not in for_types:
            found |= {(alias.name, "") for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0].startswith("ensemblekit")}


def test_a_layer_imports_only_layers_below_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(lint_imports_command, ["--config", "pyproject.toml", "--no-cache"])
    assert result.exit_code == 0, result.output


def test_every_package_says_what_lives_in_it_what_it_uses_and_where_to_start():
    for path in (ROOT / "ensemblekit").glob("*/__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for word in ("Use", "Start with"):
            assert word in docstring, f"{path.parent.name}: {word}"


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_built_in_plugin_imports_only_public_names(path):
    for module, name in imports(path):
        own = module.split(".")[0] == path.parent.name
        assert own or (module == "ensemblekit" and name in ensemblekit.__all__), f"{path.name}: {module} {name}"


def test_every_plugin_file_has_an_entry_point_or_is_used_by_one_that_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    registered = {target.partition(":")[0] for group in project["entry-points"].values() for target in group.values()}
    used = {module for path in PLUGIN_FILES for module, _ in imports(path)}
    for path in PLUGIN_FILES:
        module = f"{path.parent.name}.{path.stem}"
        assert path.stem == "__init__" or module in registered | used, f"{module} is reachable by nobody"


def test_the_core_names_no_method_model_or_data_set():
    installed = {*ensemblekit.methods(), *ensemblekit.models(), *ensemblekit.datasets()}
    # ordinary words, and the core's own in-memory data
    names = installed - {"independent", "table", "given", "frozen", "predictions"}
    for path in CORE:
        if path.parent.name == "cli":
            continue  # its help texts show examples
        strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        # the command distil writes a spec with these
        allowed = {"distillation", "multi_head"} if path.name == "distillation.py" else set()
        allowed |= {"mlp"} if path.name == "estimators.py" else set()  # an estimator needs a model by default
        assert not (names - allowed) & set(strings), path.name


def test_every_public_name_is_importable_and_documented():
    for name in ensemblekit.__all__:
        assert inspect.getdoc(getattr(ensemblekit, name)), name
    assert set(ensemblekit.__all__) <= set(dir(ensemblekit))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ensemblekit.nonsense  # noqa: B018 - the access is what is tested


def test_the_function_objective_is_not_hidden_by_a_module_of_that_name():
    code = "import ensemblekit as ek, ensemblekit.api, ensemblekit.cli; assert callable(ek.objective)"
    subprocess.run([sys.executable, "-c", code], check=True)
