"""The page of a report in a real browser: nothing is loaded from elsewhere, nothing is executed, everything fits."""

from __future__ import annotations

import pytest
from helpers.browser import BROWSERS, find_browser, visit
from helpers.odd_tables import SCRIPT, train_on_odd_table

import ensemblekit as ek

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser is installed (one of {', '.join(BROWSERS)}): apt-get install chromium"
)
LOOK = """
const root = page.documentElement, style = view.getComputedStyle(page.body);
const text = page.body.innerText;
return {
  width: root.scrollWidth, room: root.clientWidth, background: style.backgroundColor,
  resources: view.performance.getEntriesByType("resource").map(entry => entry.name),
  scripts: page.querySelectorAll("script").length, images: page.querySelectorAll("img").length,
  charts: page.querySelectorAll("figure.chart svg[role=img]").length,
  shows_script: text.includes("<script>alert(1)<" + "/script>"),
  bold: page.querySelectorAll("b, i").length,
};"""
INTERACT = """
const mark = page.querySelector("#curve-loss [data-cell]"), box = mark.getBoundingClientRect();
const move = target => target.dispatchEvent(new view.PointerEvent("pointermove",
  { bubbles: true, clientX: box.left + 1, clientY: box.top + 1 }));
move(mark);
const tip = page.getElementById("tip"), curve = tip.hidden ? "" : tip.textContent;
const image = page.querySelector("#confusion svg image"), area = image.getBoundingClientRect();
image.dispatchEvent(new view.PointerEvent("pointermove",
  { bubbles: true, clientX: area.left + 2, clientY: area.bottom - 2 }));
const matrix = tip.textContent;
const inputs = [...page.querySelectorAll(".members input")];
const lines = [...page.querySelectorAll("[data-member='1']")];
inputs[2].click();
const hidden = lines.map(line => line.style.display);
inputs[0].click(); inputs[0].click();
return { curve, matrix, members: inputs.length, hidden, again: lines.map(line => line.style.display) };"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = train_on_odd_table(tmp_path_factory.mktemp("odd"))
    return ek.report(run.path)


def test_a_page_on_a_phone_loads_nothing_executes_no_name_and_does_not_scroll_sideways(page):
    seen = visit(page, LOOK, width=360)
    assert seen.console == []
    assert seen.requested == ["/report.html"]
    assert seen.answer["resources"] == []
    assert seen.answer["width"] <= seen.answer["room"] == 360
    assert (seen.answer["scripts"], seen.answer["images"], seen.answer["bold"]) == (1, 0, 0)
    assert seen.answer["shows_script"], SCRIPT
    assert seen.answer["charts"] >= 12
    assert seen.answer["background"] == "rgb(255, 255, 255)"


def test_the_dark_theme_is_the_readers_choice(page):
    dark = visit(page, LOOK, flags=("--force-dark-mode", "--blink-settings=preferredColorScheme=0"))
    assert dark.console == []
    assert dark.answer["background"] == "rgb(20, 24, 29)"


def test_tooltips_come_from_the_data_and_members_can_be_hidden(page):
    seen = visit(page, INTERACT)
    assert seen.console == []
    assert seen.answer["curve"].startswith("epoch 1, training: ")
    assert ": " in seen.answer["matrix"]
    assert seen.answer["matrix"] != seen.answer["curve"]
    assert seen.answer["members"] == 4  # all, and each of three
    assert seen.answer["hidden"] == ["none", "none"]
    assert seen.answer["again"] == ["", ""]
