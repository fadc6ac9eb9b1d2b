"""Opens a page in headless Chromium, from a server on this machine, and returns what the page looks like there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=8000",
)
# Headless Chromium has no windows narrower than about 500 pixels, but frames.
WRAPPER = """<!DOCTYPE html><html><body style="margin:0">
<iframe id="frame" src="{page}" style="width:{width}px;height:900px;border:0"></iframe><pre id="answer"></pre>
<script>
const frame = document.getElementById("frame");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  let answer;
  try {{ answer = (() => {{ {script} }})(); }} catch (error) {{ answer = {{ error: String(error) }}; }}
  document.getElementById("answer").textContent = JSON.stringify(answer);
}};
</script></body></html>"""


def find_browser() -> str | None:
    """The path of an installed browser; None if there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Visit:
    """What a page was like: the answer of a script, the messages on the console and the paths that were requested."""

    def __init__(self, answer: Any, console: list[str], requested: list[str]) -> None:
        self.answer, self.console, self.requested = answer, console, requested


def visit(page: Path, script: str, width: int = 1000, flags: tuple[str, ...] = ()) -> Visit:
    """Open a page in a frame and run a script beside it.

    Args:
        page: the HTML file.
        script: body of a JavaScript function of `page` (its document) and `view` (its window) that returns JSON.
        width: of the frame, in pixels.
        flags: further ones of the browser.
    """
    browser = find_browser()
    assert browser is not None
    wrapper = page.with_name("visit.html")
    wrapper.write_text(WRAPPER.format(page=page.name, width=width, script=script))
    with TemporaryDirectory() as profile, _serving(page.parent) as (port, requested):
        only_here = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        command = [
            browser,
            *FLAGS,
            *flags,
            only_here,
            f"--user-data-dir={profile}",
            "--window-size=1200,900",
            "--dump-dom",
        ]
        url = f"http://127.0.0.1:{port}/{wrapper.name}"
        done = subprocess.run([*command, url], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Visit(json.loads(unescape(found[1])), console, [path for path in requested if path != f"/{wrapper.name}"])


@contextmanager
def _serving(folder: Path) -> Iterator[tuple[int, list[str]]]:
    """Serve a folder on this machine; yields the port and the list of the paths that are requested."""
    requested: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            if self.path != "/favicon.ico":  # browsers ask for it on their own
                requested.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port, requested
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
