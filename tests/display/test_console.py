"""Standard output that is closed, full, no longer read or not UTF-8, and text that would control the terminal."""

from __future__ import annotations

import errno
import io
import json
import os

import pytest
from helpers.commands import run

from ensemblekit.core.errors import ResourceError
from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.streams import ReaderGone, escape_json, printable, reader_is_gone, report
from ensemblekit.display.console import Printer
from ensemblekit.display.progress import PlainProgress, RichProgress

EVIL = "a\x1b[31mb\x9b2J\r\u202ec\x00d\udcffe\x7f"
SHOWN = r"a\x1b[31mb\x9b2J\r\u202ec\x00d\xffe\x7f"


class Broken(io.StringIO):
    """A stream that fails from some write on."""

    def __init__(self, code: int, after: int = 0) -> None:
        super().__init__()
        self.code, self.left, self.failures = code, after, 0

    def write(self, text: str) -> int:
        if self.left == 0:
            self.failures += 1
            raise OSError(self.code, os.strerror(self.code))
        self.left -= 1
        return super().write(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def encoded(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")


@pytest.mark.parametrize("method", ["json", "text", "heading", "verbatim", "document"])
def test_output_that_cannot_be_written_is_a_resource_error(method, monkeypatch):
    for code in (errno.ENOSPC, errno.EIO):
        monkeypatch.setattr("sys.stdout", Broken(code))
        with pytest.raises(ResourceError, match="cannot write") as error:
            getattr(Printer(), method)("x")
        assert os.strerror(code) in error.value.what
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(ResourceError, match="it is closed"):
        getattr(Printer(), method)("x")
    monkeypatch.setattr("sys.stdout", Broken(errno.EPIPE))
    with pytest.raises(ReaderGone):
        getattr(Printer(), method)("x")


@pytest.mark.parametrize("display", [PlainProgress, RichProgress])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE, errno.EIO])
@pytest.mark.parametrize("after", [0, 1])
def test_a_display_that_cannot_be_written_is_given_up_with_at_most_one_line(display, code, after, monkeypatch, capsys):
    stream = Broken(code, after)
    monkeypatch.setattr("sys.stdout", stream)
    progress = display()
    hooks = RunHooks([], [progress]).call
    hooks.run_started(spec=None, path=None, plan=[("data", "digits")])
    for epoch in (1, 2):
        hooks.epoch_started(ensemble=None, epoch=epoch, num_epochs=2, num_members=3, num_steps=5)
        hooks.notice(text="mind the gap")
        hooks.epoch_finished(epoch=epoch, num_epochs=2, metrics={"epoch": epoch})
    progress.close()
    assert stream.failures == 1
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == (0 if code == errno.EPIPE else 1)


def test_a_display_without_standard_output_is_silent(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", None)
    PlainProgress().show_plan([("data", "digits")])
    assert capsys.readouterr().err == ""


def test_a_reader_that_is_gone_is_told_from_other_broken_pipes(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert not reader_is_gone()
        os.close(reading)
        assert reader_is_gone()
    monkeypatch.setattr("sys.stdout", None)
    assert not reader_is_gone()


@pytest.mark.parametrize("stream", [None, Broken(errno.EIO)])
def test_a_report_without_standard_error_is_lost_without_harm(stream, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", stream)
    report("error: x")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r"])
def test_characters_that_a_terminal_cannot_show_are_replaced(encoding, monkeypatch):
    stream = encoded(encoding)
    monkeypatch.setattr("sys.stdout", stream)
    printer = Printer()
    printer.text("λ ≥ 0, 8×8 …")
    printer.table(("name", "größe"), [("日本", "é")])
    printer.json({"λ": "日本é😀"})
    text = stream.buffer.getvalue().decode(encoding)
    assert "lambda" in text or "λ" in text
    assert ">= 0" in text or "≥ 0" in text
    assert json.loads(text[text.index("{") :]) == {"λ": "日本é😀"}
    assert r"\u65e5" in text


@pytest.mark.parametrize("method", ["text", "heading", "verbatim"])
def test_no_control_character_reaches_the_terminal(method, capsys):
    getattr(Printer(), method)(EVIL)
    assert capsys.readouterr().out == SHOWN + "\n"


def test_no_control_character_of_a_cell_reaches_the_terminal(capsys, monkeypatch):
    Printer().table(("name", EVIL), [(EVIL, "two\nlines")])
    assert capsys.readouterr().out == f"name{' ' * (len(SHOWN) - 4)}  {SHOWN}\n{SHOWN}  two; lines\n"
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    printer = Printer()
    assert printer.for_a_person
    printer.table(("name", EVIL), [(EVIL, "x")])
    printer.panel("plan", [("name", EVIL)])
    printer.document(f"{EVIL}\r\n")
    text = terminal.getvalue()
    assert text.count(SHOWN) == 4
    assert not {"\x9b", "\r", "\x1b[31mb", "\u202e", "\x00"} & {
        text[i : i + n] for i in range(len(text)) for n in (1, 6)
    }


def test_a_document_on_a_pipe_is_exact(capsys):
    Printer().document("a\x1b[31m\r\nb")
    assert capsys.readouterr().out == "a\x1b[31m\r\nb"


def test_json_escapes_what_it_may_and_stays_equal(capsys):
    Printer().json({EVIL: "é\n"})
    text = capsys.readouterr().out
    assert json.loads(text) == {EVIL: "é\n"}
    assert "é" in text
    assert text.isascii() or not {"\x9b", "\x7f", "\u202e", "\udcff"} & set(text)
    assert escape_json("{\n}") == "{\n}"


def test_newlines_in_names_stay_on_one_line():
    assert printable("a\nerror: b\tc") == "a error: b c"
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_the_names_in_an_error_are_printable():
    result = run("validate", "no\x1b[31m\nerror: fake\x9b.toml")
    assert result.exit_code == 2
    assert result.stderr.startswith(r"error: neither a file nor a shipped spec; no\x1b[31m error: fake\x9b.toml;")
    assert len(result.stderr.splitlines()) == 1
    assert r"no\x1b" in run("inspect", "no\x1b").stderr
    assert r"\x1b" in run("lst\x1b").stderr
    assert "\x1b" not in run("--debug", "validate", "no\x1b").stderr
