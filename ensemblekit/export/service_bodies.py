"""Bodies of requests: read within limits, and split into rows or files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from ensemblekit.export.service_inputs import File, json_type
from ensemblekit.export.service_limits import Limits, Refused

JSON, FORM = "application/json", "multipart/form-data"
FIELD = "files"
"""The field of uploaded images."""


def media_type(request: Request) -> str:
    """Return the type of a request's body without parameters, such as "application/json"."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read a body, and not more of it than is allowed.

    Raises:
        Refused: it is empty, too large, or does not arrive in time.
    """
    fix = f"send at most {limits.max_body_bytes:,} bytes in a request"
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.max_body_bytes:
        raise Refused(413, f"the body has {int(announced):,} bytes, more than {limits.max_body_bytes:,}", fix)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body_bytes:  # a chunked body does not say how long it is
                    raise Refused(413, f"the body has more than {limits.max_body_bytes:,} bytes", fix)
    except TimeoutError as error:
        what = f"the body did not arrive within {limits.body_seconds:g} s"
        raise Refused(408, what, "send it again, without pauses") from error
    if not body:
        raise Refused(422, "the body is empty", "send rows or files; /docs shows examples")
    return bytes(body)


async def read_files(request: Request, body: bytes, max_files: int) -> list[File]:
    """Return the uploaded files of a form in their order; they are kept in memory.

    Raises:
        Refused: it is not such a form, or has fields other than files.
    """

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(request.headers, stream(), max_files=max_files, max_fields=max_files)
    parser.spool_max_size = len(body)  # otherwise files of a megabyte would be written to disk
    fix = f"send at most {max_files:,} images as files in the field {FIELD}: curl -F {FIELD}=@image.png"
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refused(422, f"not a form with files: {error.message}", fix) from error
    files: list[File] = []
    try:
        for name, value in form.multi_items():
            if name != FIELD or not isinstance(value, UploadFile):
                what = f"the field {name!r:.60} is {'no file' if name == FIELD else 'not known'}"
                raise Refused(422, what, fix)
            files.append((value.filename or "", await value.read()))
    finally:
        await form.close()
    check_count(len(files), max_files, "files")
    return files


def read_rows(body: bytes, max_rows: int) -> list[Any]:
    """Read the rows of a JSON body: a list, or an object whose "rows" is one.

    Raises:
        Refused: it is not JSON, has another structure, or has no rows or too many.
    """
    where_rows = 'send {"rows": [...]} with a row for each sample'
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise Refused(422, "the JSON is nested too deeply", where_rows) from error
    except ValueError as error:  # also of text that is not UTF-8, and of numbers with thousands of digits
        raise Refused(422, f"the body is not valid JSON: {error}", where_rows) from error
    rows = value.get("rows") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        got = "no rows" if isinstance(value, dict) and rows is None else f"a value of type {json_type(rows)}"
        raise Refused(422, f"expected a list of rows, got {got}", where_rows)
    if isinstance(value, dict) and (unknown := [name for name in value if name != "rows"]):
        raise Refused(422, f"expected no key but rows, got {', '.join(map(repr, unknown[:5]))}", where_rows)
    check_count(len(rows), max_rows, "rows")
    return rows


def check_count(count: int, most: int, noun: str) -> None:
    """Refuse a request with no samples, or with too many."""
    if not count:
        raise Refused(422, f"expected at least one of the {noun}, got none", f"add {noun}")
    if count > most:
        raise Refused(413, f"{count:,} {noun} are more than {most:,}", f"send at most {most:,} {noun} in a request")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number; null stands for a missing value")
