"""Every recipe of the cookbook is short, says where it comes from, passes its contract and trains."""

from __future__ import annotations

import ast
import re
import tomllib
from typing import Any

import pytest
from helpers.commands import run
from helpers.places import ROOT

import ensemblekit as ek

COOKBOOK = ROOT / "docs" / "cookbook"
RECIPES = sorted(COOKBOOK.glob("*.py"))
PAGE = COOKBOOK.with_suffix(".md").read_text()
MAX_LINES = 45
"""Lines of code, without the docstring of the file and blank lines."""
BASE = {
    "data": {"name": "digits", "limit_train": 200, "limit_test": 100},
    "model": {"name": "mlp", "hidden": [16]},
    "ensemble": {"members": 3},
    "training": {"epochs": 2, "batch_size": 50},
    "engine": {"name": "sequential", "device": "cpu"},
}

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def spec_of(recipe: Any) -> dict[str, Any]:
    """The small base spec with the tables of the recipe's own part; a table that names something else replaces one."""
    (own,) = re.findall(r"```toml\n(.*?)```", recipe.read_text(), flags=re.DOTALL)
    spec: dict[str, Any] = {key: dict(table) for key, table in BASE.items()}
    for key, table in tomllib.loads(own).items():
        is_other = not isinstance(table, dict) or ("name" in table and table["name"] != spec.get(key, {}).get("name"))
        spec[key] = table if is_other else spec.get(key, {}) | table
    if "groups" in spec["ensemble"]:
        del spec["ensemble"]["members"]
    return spec


@every_recipe
def test_a_recipe_is_short_and_uses_public_names_only(recipe):
    tree = ast.parse(recipe.read_text())
    code = recipe.read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= MAX_LINES
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in modules if module.startswith("ensemblekit.")]
    assert f"<!-- generated: recipe {recipe.stem} -->" in PAGE


@every_recipe
def test_a_recipe_names_its_source_and_passes_its_contract(recipe):
    paragraph = ast.get_docstring(ast.parse(recipe.read_text())).partition("```")[0]
    assert re.search(r"\b(19|20)\d\d\b", paragraph) or "extension" in recipe.read_text().lower()
    result = run("check", str(recipe))
    assert result.exit_code == 0, result.output


@every_recipe
def test_a_recipe_trains_and_its_ensemble_loads(recipe, tmp_path):
    trained = ek.train(spec_of(recipe), out=tmp_path / "run", progress=False, plugins=[recipe])
    assert trained.status == "finished"
    loaded = ek.load(tmp_path / "run", plugins=[recipe])
    kept = trained.outputs("test")
    assert kept.outputs.isfinite().all()
    assert loaded.info.task in ("classification", "regression")


def test_every_recipe_of_the_page_exists():
    assert set(re.findall(r"<!-- generated: recipe (\w+) -->", PAGE)) == {recipe.stem for recipe in RECIPES}
