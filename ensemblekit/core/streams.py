"""Standard output and standard error as a program may find them: closed, full, no longer read, or not UTF-8.

Text from outside (names of classes, files and columns, descriptions of plugins, messages of exceptions) goes through
`printable`, so that it cannot control the terminal. Nothing slow is imported, since `ensemblekit --help` uses this.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import select
import sys
from contextlib import suppress
from typing import TextIO

from ensemblekit.core.errors import ResourceError

# Control characters (C0, DEL, C1), marks that reverse the direction of text, line separators, and lone surrogates:
# the bytes of file names that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN = {"≥": ">=", "≤": "<=", "×": "x", "…": "...", "²": "2", "λ": "lambda", "–": "-", "−": "-"}
REPLACE = "ensemblekit.replace"
"""The error handler for characters that an encoding does not have."""


class ReaderGone(Exception):
    """Whoever reads standard output has closed it, as `head` does."""


class StandardOutput:
    """Standard output as a file for rich: text is written at once, and unknown characters are replaced.

    Args:
        optional: whether text may be lost. If so, a failure is one warning, and nothing is written after it.

    Raises:
        ReaderGone: by `write`, unless optional: the other end of the pipe is closed.
        ResourceError: by `write`, unless optional: the stream is closed or full.
    """

    def __init__(self, optional: bool = False) -> None:
        self.optional = optional
        self.lost = False

    @property
    def encoding(self) -> str:
        """The encoding of the stream."""
        return getattr(_stdout(), "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        with suppress(OSError, ValueError):
            return bool((stream := _stdout()) and stream.isatty())
        return False

    def write(self, text: str) -> int:
        """Write text, and wait until the system has taken it."""
        if not self.lost:
            try:
                self._write(text)
            except (OSError, ValueError) as error:  # ValueError: the stream was closed in Python
                if not self.optional:
                    raise output_error(error) from error
                self.lost = True
                if not isinstance(error, BrokenPipeError):
                    report(f"warning: standard output cannot be written: {_reason(error)}; the run is not affected")
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` waits."""

    def _write(self, text: str) -> None:
        stream = _stdout()
        if stream is None and not self.optional:
            raise OSError(errno.EBADF, "it is closed")
        if stream is not None:
            stream.write(text.encode(self.encoding, REPLACE).decode(self.encoding))
            stream.flush()


class DocumentOutput(StandardOutput):
    """Standard output for the content of a file: exact on a pipe, printable on a terminal."""

    def write(self, text: str) -> int:
        """Write text, and wait until the system has taken it."""
        super().write(printable(text.replace("\r\n", "\n"), keep="\n\t") if self.isatty() else text)
        return len(text)


def printable(text: str, keep: str = "") -> str:
    """Make control characters visible, so that text from outside cannot control a terminal or fake a line.

    Args:
        text: Any text.
        keep: Characters to leave as they are, such as the newlines of a document. Other newlines become spaces.
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _visible(found[0]), text)


def escape_json(document: str) -> str:
    """Escape the control characters and surrogates that `json.dumps` leaves as they are."""
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", document)


def report(line: str) -> None:
    """Print a line on standard error, if there is one."""
    if sys.stderr is not None:  # print() would take None for standard output
        with suppress(OSError, ValueError):
            print(printable(line), file=sys.stderr, flush=True)


def output_error(error: OSError | ValueError) -> ReaderGone | ResourceError:
    """Return the error of a failed write to standard output."""
    if isinstance(error, BrokenPipeError):
        return ReaderGone()
    fix = "make room, or redirect the output elsewhere"
    return ResourceError(f"cannot write: {_reason(error)}", "standard output", fix)


def reader_is_gone() -> bool:
    """Whether nobody reads standard output any more; False where that cannot be known."""
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: no such stream, or no poll on this system
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def prepare_streams() -> None:
    """Make the standard streams safe to use, for a program that owns its process.

    A closed descriptor is opened on the null device: otherwise the next file to be opened would get its number, and
    with it everything that a C library prints.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=REPLACE)


def discard_unwritten() -> None:
    """Drop the text that a broken stream still holds, or Python would fail on it when the process ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _stdout() -> TextIO | None:
    """Standard output as it is now; below a live display of rich, the stream that it took the place of."""
    return getattr(sys.stdout, "rich_proxied_file", sys.stdout)


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "strerror", None) or error)


def _visible(character: str) -> str:
    if character in "\n\t":
        return " "
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    plain = (_PLAIN.get(character) or _visible(character) for character in characters)
    return "".join(plain), error.end


codecs.register_error(REPLACE, _replace)
