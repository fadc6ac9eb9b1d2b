"""The service as an ASGI application: its paths, its OpenAPI document, and how errors are answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import ensemblekit
from ensemblekit.core.errors import DataError, NumericError, explain, is_out_of_memory
from ensemblekit.core.streams import printable, report
from ensemblekit.export.service_bodies import FIELD, FORM, JSON, media_type, read_body, read_files, read_rows
from ensemblekit.export.service_inputs import ImageRows
from ensemblekit.export.service_limits import Refused
from ensemblekit.export.service_metrics import CONTENT_TYPE
from ensemblekit.export.service_requests import Requests
from ensemblekit.export.service_schema import PREDICTIONS, Health, ModelDescription, Problem
from ensemblekit.export.service_state import Service

TOP = 100
"""Most probabilities of an answer, unless the client asks for more or fewer."""
TITLES = {
    408: "The body did not arrive in time.",
    413: "The body is too large, or has too many rows or files.",
    415: "The body is neither JSON nor, for runs on images, a form with files.",
    422: "The rows or images do not fit the run.",
    429: "Too many requests wait. Try again later.",
    500: "The prediction failed.",
    503: "The service is stopping, or short of memory.",
}
PAGE_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


class Json(JSONResponse):
    """JSON in ASCII, which can also say lone surrogates: clients may send them, and names of files may have them."""

    def render(self, content: Any) -> bytes:
        """Write a value."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def make_app(service: Service) -> Requests:
    """Make the application of a service."""
    app = FastAPI(
        title=f"ensemblekit: {service.model['run']}",
        description="Predictions of a trained ensemble, with uncertainty.",
        version=ensemblekit.__version__,
        docs_url=None,  # FastAPI's pages load scripts from other servers
        redoc_url=None,
    )
    _handle_errors(app)
    _add_predict(app, service)
    _add_descriptions(app, service)
    # around everything, so that failures are counted, too
    return Requests(app, service, app.openapi()["paths"])


def _add_predict(app: FastAPI, service: Service) -> None:
    async def predict(
        request: Request,
        top: Annotated[int, Query(ge=1, le=2**31 - 1, description="most probabilities of an answer")] = TOP,
    ) -> Response:
        """Predict rows, or images, in the order in which they are sent."""
        with service.admitted():
            try:
                return Json({"predictions": await _predictions(service, request, top)})
            except ClientDisconnect:  # nobody will read this
                raise Refused(400, "the client closed the connection", "send it again") from None
            except (DataError, NumericError) as error:
                raise Refused.by(error) from error
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                report(f"warning: a request failed: {explain(error).line}")
                raise Refused(503, "out of memory", "send fewer samples, or try again later") from error

    app.add_api_route(
        "/predict",
        predict,
        methods=["POST"],
        response_class=Json,
        responses={200: {"model": PREDICTIONS[service.ensemble.info.task]}, **_problems(*TITLES)},
        openapi_extra={"requestBody": {"required": True, "content": _content(service)}},
    )


async def _predictions(service: Service, request: Request, top: int) -> list[dict[str, Any]]:
    """Read a request, queue its samples and wait for their answers."""
    kind, rows = media_type(request), service.rows
    takes_files = isinstance(rows, ImageRows) and rows.takes_files
    if kind != JSON and not (kind == FORM and takes_files):
        fix = f"set Content-Type: {JSON}" + (f", or upload files: curl -F {FIELD}=@image.png" if takes_files else "")
        raise Refused(415, f"a body of the type {kind or 'unknown'!r:.60} is not supported", fix)
    body = await read_body(request, service.limits)
    if isinstance(rows, ImageRows) and kind == FORM:
        uploaded = await read_files(request, body, service.limits.max_rows)
        inputs = await service.prepared(rows.decode, uploaded, service.limits.max_pixels)
        answers = await service.answers(inputs, top)
        return [{"file": name, **answer} for (name, _), answer in zip(uploaded, answers, strict=True)]
    inputs = await service.prepared(lambda: rows.prepare(read_rows(body, service.limits.max_rows)))
    return await service.answers(inputs, top)


def _add_descriptions(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={200: {"model": Health}, **_problems(503)})
    async def health() -> Response:
        """Say whether the service takes requests: 503 while it is stopping."""
        service.check_open()
        return Json({"status": "ready"})

    @app.get("/model", responses={200: {"model": ModelDescription}})
    async def model() -> Response:
        """Describe the run: its spec, classes, metrics, calibration, input and limits."""
        return Json(service.model)

    metrics_content = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", response_class=Response, responses={200: metrics_content})
    async def metrics() -> Response:
        """Return counters in the format of Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/docs", response_class=HTMLResponse)
    async def docs(request: Request) -> Response:
        """Show a page about the service; it needs neither scripts nor other servers."""
        return HTMLResponse(_page(app, service, str(request.base_url).rstrip("/")), headers=PAGE_HEADERS)


def _content(service: Service) -> dict[str, Any]:
    """The bodies that /predict takes, for the OpenAPI document."""
    rows = {"type": "array", "items": service.rows.schema, "minItems": 1, "maxItems": service.limits.max_rows}
    in_object = {"type": "object", "properties": {"rows": rows}, "required": ["rows"], "additionalProperties": False}
    content: dict[str, Any] = {JSON: {"schema": {"anyOf": [in_object, rows]}}}
    if service.rows.example is not None:
        content[JSON]["example"] = {"rows": [service.rows.example]}
    if isinstance(service.rows, ImageRows) and service.rows.takes_files:
        upload = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
        form = {"type": "object", "properties": {FIELD: upload}, "required": [FIELD], "additionalProperties": False}
        content[FORM] = {"schema": form}
    return content


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Problem, "description": TITLES[status]} for status in statuses}


def _handle_errors(app: FastAPI) -> None:
    """Answer every error with a JSON object of `error` and `fix`."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return Json(error.to_json(), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return Json(Refused(422, f"{where}: {first['msg']}", "/docs lists all parameters").to_json(), 422)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        what = HTTPStatus(error.status_code).phrase.lower()
        where = f"{request.method} {request.url.path}"
        body = Refused(error.status_code, f"{what}: {where}", "/docs lists all paths").to_json()
        return Json(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        report(f"warning: a request failed: {explain(error).line}")
        what = "the prediction failed; the log of the service says why"
        return Json(Refused(500, what, "tell those who run the service").to_json(), 500)


def _page(app: FastAPI, service: Service, address: str) -> str:
    """The page about the service; every text is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.finalize = lambda value: printable(value, keep="\n") if type(value) is str else value
    template = (files(__package__) / "templates" / "service.html").read_text(encoding="utf-8")
    paths = [
        (method.upper(), path, operation["description"], _statuses(operation))
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    ]
    facts: Mapping[str, Any] = {**service.model, "limits": asdict(service.limits)}
    return environment.from_string(template).render(
        model=facts, paths=paths, examples=service.examples(address), address=address
    )


def _statuses(operation: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(status, answer["description"]) for status, answer in operation["responses"].items()]
