"""The command that serves a run over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ensemblekit.cli.options import inference_device_option, plugin_option, run_argument
from ensemblekit.core.errors import UsageError
from ensemblekit.core.streams import report


@click.command()
@run_argument
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. 0.0.0.0 lets other machines in; there is no authentication.",
)
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 takes a free one."
)
@click.option(
    "--max-batch",
    default=256,
    show_default=True,
    type=click.IntRange(min=1),
    help="Most samples that are predicted at once.",
)
@click.option(
    "--max-wait",
    metavar="MS",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Milliseconds that a request waits for others that are arriving, to be predicted with them.",
)
@click.option(
    "--max-body",
    metavar="MB",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Largest body of a request, in megabytes.",
)
@click.option(
    "--max-rows",
    default=1_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="Most rows or images of a request.",
)
@click.option(
    "--max-pixels",
    default=40_000_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="Most pixels of all images of a request together.",
)
@click.option(
    "--max-queue",
    default=128,
    show_default=True,
    type=click.IntRange(min=1),
    help="Most requests that are read or wait at one time; more get status 429.",
)
@click.option(
    "--drain",
    metavar="SECONDS",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="How long new requests still get an answer, status 503, after the signal to stop.",
)
@inference_device_option
@plugin_option
def serve(
    run_path: Path,
    host: str,
    port: int,
    max_batch: int,
    max_wait: float,
    max_body: float,
    max_rows: int,
    max_pixels: int,
    max_queue: int,
    drain: float,
    device: str,
    plugin_files: Sequence[str],
) -> None:
    """Serve a trained ensemble over HTTP, with uncertainty.

    POST /predict takes rows as JSON, or image files if the run was trained on images, and returns for each what
    ensemblekit predict prints. GET /model describes the run, /health says whether requests are taken, /metrics has
    counters for Prometheus, /docs is a page for people and /openapi.json one for programs. Needs the extra serve.

    Requests that wait are predicted together. Those beyond a limit get status 413, 422, 429 or 503, and a JSON object
    that says what to do. Ctrl-C or SIGTERM stops the service once every request that it has admitted has its answer;
    the exit code is then 0.
    """
    _check_extra()
    from ensemblekit import api
    from ensemblekit.display.console import Printer
    from ensemblekit.export import service as services
    from ensemblekit.export.service_limits import Limits
    from ensemblekit.export.service_state import Service

    limits = Limits(max_batch, max_wait / 1000, round(max_body * 1_000_000), max_rows, max_pixels, max_queue)
    with services.bind(host, port) as bound:  # before the run is loaded, which takes longer
        if not services.is_loopback(bound):
            report("warning: other machines can reach the service, and there is no authentication")
        ensemble = api.load(run_path, plugins=plugin_files, device=device)
        service = Service(api.open_run(run_path, plugin_files), ensemble, limits)
        printer, address = Printer(optional=True), services.url_of(bound)

        def started() -> None:
            printer.verbatim(f"serving {run_path} at {address}")
            for example in service.examples(address):
                printer.verbatim(f"  {example}")
            printer.verbatim(f"about it: {address}/docs   stop it: Ctrl-C")

        services.serve(service, bound, drain, started)


def _check_extra() -> None:
    """Raise a `UsageError` that names the extra if a package of the service is missing."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        what = f"the service needs {error.name}, which is not installed"
        raise UsageError(what, "ensemblekit serve", "pip install 'ensemblekit[serve]'") from error


COMMANDS = {"Use a trained ensemble": (serve,)}
