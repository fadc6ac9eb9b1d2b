"""All code and all commands in the README and the documentation are run as a reader would run them."""

from __future__ import annotations

import sys

import pytest
from helpers.documents import Reader, blocks, sections, shows, words
from helpers.places import ROOT

from ensemblekit.core.errors import SpecError
from ensemblekit.core.kinds import KINDS
from ensemblekit.core.verification import HOOK_ARGUMENTS

README = list(blocks(ROOT / "README.md"))
GUIDE = ROOT / "docs" / "writing-plugins.md"
COOKBOOK = GUIDE.with_name("cookbook.md")
"""Its recipes are independent plugins: test_cookbook.py runs them."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*GUIDE.parent.glob("*.md")} - {COOKBOOK})]
READ_IN_ONE_GO = {
    **{page.stem: list(blocks(page)) for page in PAGES if page != GUIDE},
    **{f"{GUIDE.stem}: {title}": part for title, part in sections(GUIDE).items()},
}


@pytest.mark.parametrize("title", [title for title, part in READ_IN_ONE_GO.items() if part])
def test_the_code_of_a_page_works_from_the_first_block_to_the_last(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENSEMBLEKIT_DATA", str(tmp_path / "cache"))
    reader = Reader(tmp_path)
    modules = set(sys.modules)
    for block in READ_IN_ONE_GO[title]:
        # as for a reader who starts Python here and has installed the packages that the page installs
        for path in (tmp_path, *tmp_path.glob("*/src")):
            if str(path) not in sys.path:
                monkeypatch.syspath_prepend(path)
        reader.follow(block)
    for name in set(sys.modules) - modules:  # modules imported from the directory vanish with it
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_failing_code_a_wrong_output_and_a_command_that_is_not_run_are_noticed(tmp_path):
    document = tmp_path / "page.md"
    reader = Reader(tmp_path)
    for code, problem in {
        "```python\nassert 1 + 1 == 3\n```": AssertionError,
        "```python\nprint(0.5)\n```\n\n```text\n0.6\n```": AssertionError,
        "```console\nensemblekit inspect nonsense\n```": AssertionError,
        "```console\nrm -r precious\n```": AssertionError,
        "```toml\n[training]\nepochs = 0\n```": SpecError,
        "```ruby\nputs 1\n```": AssertionError,
    }.items():
        document.write_text(f"{code}\n")
        (block,) = blocks(document)
        with pytest.raises(problem):
            reader.follow(block)


def test_a_traceback_names_the_line_of_the_document(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("# Title\n\n## Part\n\n```python\nfine = 1\n1 / 0\n```\n")
    (block,) = sections(document)["Part"]
    with pytest.raises(ZeroDivisionError) as raised:
        Reader(tmp_path).follow(block)
    assert (str(raised.traceback[-1].path), raised.traceback[-1].lineno + 1) == (str(document), 7)


def test_an_ellipsis_in_a_shown_output_stands_for_any_number_of_lines():
    lines = ["a", "b", "c", "d"]
    assert shows(["a", "…", "d"], lines)
    assert shows(["…", "c", "…"], lines)
    assert shows(lines, lines)
    assert not shows(["a", "c", "…"], lines)
    assert not shows(["…", "c"], lines)
    assert not shows(["a", "…", "e", "…"], lines)


def test_outputs_are_compared_by_their_words_and_by_numbers_that_are_the_same_everywhere():
    assert words("epoch  1   0.25 s", numbers=False) == words("epoch 1 7e-05 s", numbers=False)
    assert words("0.25", numbers=True) != words("0.26", numbers=True)


def test_the_plugin_of_the_readme_has_fifteen_lines():
    (softmin,) = [block.content for block in README if block.file_name == "softmin.py"]
    assert len([line for line in softmin.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("hook", HOOK_ARGUMENTS)
def test_every_hook_has_a_heading_and_an_example(hook):
    text = GUIDE.read_text()
    assert f"\n### `{hook}`\n" in text
    assert f"    def {hook}(self" in text


@pytest.mark.parametrize("group", [kind.group for kind in KINDS.values()])
def test_every_kind_of_plugin_is_in_the_table_of_one_file_and_one_line(group):
    assert f'| `[project.entry-points."{group}"]` |' in GUIDE.read_text()
