"""The documentation is complete and consistent: everything has its page, links work, generated parts are current."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from helpers.places import ROOT

import ensemblekit
from ensemblekit.cli import main
from ensemblekit.core import hookspecs
from ensemblekit.core.verification import HOOK_ARGUMENTS

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
CODE = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def headings(path: Path) -> set[str]:
    """The anchors that GitHub and the site make of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", CODE.sub("", path.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_generated_parts_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    outdated = importlib.import_module("generate").outdated_pages(write=False)
    assert not outdated, "run python docs/generate.py"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_link_leads_to_a_file_and_a_heading(path):
    for target, anchor in LINK.findall(CODE.sub("", path.read_text())):
        file = path.parent / target if target else path
        assert file.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in headings(file), f"{path.name}: {target}#{anchor}"


def test_every_page_is_on_the_site_and_in_the_readme():
    names = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert names == set(re.findall(r"^([a-z-]+)$", page("index"), flags=re.MULTILINE))
    for name in names:
        assert f"(docs/{name}.md)" in README, name


def test_the_readme_is_a_landing_page():
    assert len(README.splitlines()) <= 170


@pytest.mark.parametrize("hook", sorted(HOOK_ARGUMENTS))
def test_every_hook_says_when_it_is_called_and_has_a_section(hook):
    assert "Called" in inspect.getdoc(getattr(hookspecs, hook))
    assert f"\n### `{hook}`\n" in page("hooks")


def test_every_command_has_a_row_and_its_help():
    for command in main.commands:
        assert f"| `ensemblekit {command}" in page("command-line"), command
        assert f"\n### {command}\n" in page("command-line"), command


@pytest.mark.parametrize("method", sorted(ensemblekit.methods()))
def test_every_method_is_in_the_readme_and_has_a_section_with_formula_and_advice(method):
    assert f"| [`{method}`](docs/methods.md#{method}) |" in README
    section = page("methods").partition(f"\n## `{method}`\n")[2].partition("\n## ")[0]
    for part in ("$$", f"<!-- generated: plugin method {method} -->", "**When to use it:**", "**When not:**"):
        assert part in section, part


def test_every_model_and_data_set_is_documented():
    for name in ensemblekit.models():
        assert f"\n## `{name}`\n" in page("models"), name
    for name in ensemblekit.datasets():
        assert f"| `{name}` |" in page("data"), name
        assert page("data").count(f"`{name}`") > 1, name


def test_every_public_name_is_in_the_reference():
    for name in ensemblekit.__all__:
        assert re.search(rf"\bensemblekit\.{name}\b", page("python-reference")), name


def test_every_dependency_has_a_purpose():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for requirement in dependencies:
        assert f"| {re.split('[>=<]', requirement)[0]} |" in page("architecture"), requirement


def test_ci_runs_the_readmes_own_commands_and_builds_the_site():
    script = (ROOT / ".ci" / "run").read_text()
    commands = re.findall(r"^(pip install -e .*)$", README, flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        assert f"\n{command}\n" in script, command
    assert "sphinx-build -W " in script


def test_versions_agree():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
