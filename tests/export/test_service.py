"""The service over real HTTP: its answers are those of `predict`, and nothing that a client sends breaks it."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from helpers import tiny_runs
from helpers.image_files import encoded, pixels
from helpers.services import problem, serving
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

import ensemblekit as ek
from ensemblekit.export.service_queue import Batcher
from ensemblekit.inference.prediction import predict_files

NUM_REQUESTS, NUM_CLIENTS = 2000, 32
TOLERANCE = 1e-6
"""How far a probability may be from that of `predict`: the order of additions depends on the size of a batch."""


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[Path]:
    """Forty images of digits' size as files."""
    folder = tmp_path_factory.mktemp("images")
    files = [folder / f"{index}.png" for index in range(40)]
    for index, file in enumerate(files):
        file.write_bytes(encoded(pixels(index, 8, 8)))
    return files


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on digits that is calibrated and has prediction sets."""
    path = tmp_path_factory.mktemp("digits") / "run"
    tiny_runs.train(path, epochs=30, optimizer={"name": "adam", "lr": 0.02})
    ek.calibrate(path, "temperature")
    ek.conform(path, error=0.3)
    return path


@pytest.fixture(scope="module")
def service(run):
    """The service of the run on digits, with a small limit on bodies."""
    with serving(run, max_body_bytes=1_000_000, max_rows=50, max_pixels=1_000_000) as served:
        yield served


@pytest.fixture(scope="module")
def client(service):
    with httpx.Client(base_url=service[0]) as made:
        yield made


@pytest.fixture(scope="module")
def expected(run, images) -> list[dict[str, Any]]:
    """What `predict` says about the images."""
    return [prediction.to_dict() for prediction in predict_files(ek.load(run), images, probabilities=True)]


def assert_same(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare an answer of the service with the record of `predict`."""
    close = {name: pytest.approx(expected[name], abs=TOLERANCE) for name in expected if name not in ("file", "class")}
    assert answer["class"] == expected["class"]
    assert answer["probability"] == close["probability"]
    assert {f"probability[{name}]": value for name, value in answer["probabilities"].items()} == {
        name: value for name, value in close.items() if name.startswith("probability[")
    }
    assert answer["uncertainty"] == {name: close[name] for name in ("entropy", "mutual_information", "agreement")}


def test_uploads_are_answered_in_their_order_as_predict_answers(client, images, expected):
    uploads = [("files", (file.name, file.read_bytes())) for file in images]
    answers = client.post("/predict", files=uploads).json()["predictions"]
    assert [answer["file"] for answer in answers] == [file.name for file in images]
    for answer, record in zip(answers, expected, strict=True):
        assert_same(answer, record)
        assert " | ".join(answer["set"]) == record["set"]
        assert list(answer["probabilities"].values()) == sorted(answer["probabilities"].values(), reverse=True)


def test_arrays_of_pixels_are_answered_as_the_files_are(client, expected):
    rows = [pixels(index, 8, 8)[None].tolist() for index in range(2)]
    rows.append(pixels(2, 8, 8)[None].astype(float).tolist())  # JSON does not distinguish 7 and 7.0
    for body in (rows, {"rows": rows}):
        answers = client.post("/predict", json=body, params={"top": 3}).json()["predictions"]
        assert [answer["class"] for answer in answers] == [record["class"] for record in expected[:3]]
        assert {len(answer["probabilities"]) for answer in answers} == {3}


def test_2000_requests_from_32_clients_are_all_answered_as_predict_answers(service, expected):
    url, served = service
    address = url.removeprefix("http://")
    bodies = [json.dumps([pixels(index, 8, 8)[None].tolist()]) for index in range(len(expected))]
    answered: list[tuple[int, int, bytes]] = []

    def ask(first: int) -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        for number in range(first, NUM_REQUESTS, NUM_CLIENTS):
            index = number % len(bodies)
            connection.request("POST", "/predict", bodies[index], {"Content-Type": "application/json"})
            response = connection.getresponse()
            answered.append((index, response.status, response.read()))
        connection.close()

    clients = [threading.Thread(target=ask, args=(first,)) for first in range(NUM_CLIENTS)]
    before = served.metrics.registry.get_sample_value("ensemblekit_batch_size_count")
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert len(answered) == NUM_REQUESTS
    assert {status for _, status, _ in answered} == {200}
    # answers differ only by rounding, so that there are few different ones for an image
    for index, body in {(index, body) for index, _, body in answered}:
        assert_same(json.loads(body)["predictions"][0], expected[index])
    batches = served.metrics.registry.get_sample_value("ensemblekit_batch_size_count") - before
    assert batches < NUM_REQUESTS / 2, "requests that waited were not joined"
    assert served.num_admitted == len(served.batcher) == 0


BAD_BODIES = {
    "empty": (b"", "the body is empty"),
    "not JSON": (b"{rows", "not valid JSON"),
    "not UTF-8": (b'["\xff"]', "not valid JSON"),
    "deep": (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    "NaN": (json.dumps([[[[float("nan")] * 8] * 8]]).encode(), "NaN is not a JSON number"),
    "too many digits": (b"[" + b"9" * 5000 + b"]", "not valid JSON"),
    "no rows": (b"[]", "got none"),
    "other keys": (b'{"rows": [1], "path": "/etc/passwd"}', "'path'"),
    "no list": (b'{"row": 1}', "got no rows"),
    "a number": (b"7", "type number"),
    "a text": (b'["x"]', "expected numbers only; row 1"),
    "another shape": (b"[[[1, 2], [3, 4]]]", "expected shape (1, 8, 8), got (2, 2); row 1"),
    "ragged": (b"[[[1, 2], [3]]]", "equal length; row 1"),
    "fractions": (json.dumps([np.full((1, 8, 8), 0.5).tolist()]).encode(), "integers from 0 to 255; row 1"),
    "lone surrogates": (b'{"rows": [1], "\\ud800": 1}', r"'\ud800'"),
    "a huge number": (json.dumps([np.full((1, 8, 8), 300).tolist()]).encode(), "integers from 0 to 255"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_cannot_be_used_is_refused_with_what_to_do(client, name):
    body, error = BAD_BODIES[name]
    response = client.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert error in problem(response, 422)["error"]


def test_images_that_cannot_be_used_are_refused_by_name_before_any_pixel_is_decoded(client):
    bomb, good = encoded(np.zeros((30_000, 3_000), dtype=np.uint8)), encoded(pixels(1, 8, 8))
    for content, error in {
        bomb: "too many pixels",
        encoded(np.zeros((1_001, 1_000), dtype=np.uint8)): "too many pixels: 1,001,064",
        good[: len(good) // 2]: 'cannot decode image; file "<b>.png"',
        b"MZ not an image": 'cannot decode image; file "<b>.png"',
        b"": "cannot decode image",
    }.items():
        files = [("files", ("good.png", good)), ("files", ("<b>.png", content))]
        assert error in problem(client.post("/predict", files=files), 422)["error"]
    for field, value in [("image", ("a.png", good)), ("files", (None, b"text"))]:
        assert "-F files=@image.png" in problem(client.post("/predict", files=[(field, value)]), 422)["fix"]
    form = {"Content-Type": "multipart/form-data; charset=unicode_escape; boundary=x"}
    part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="\\ud800"\r\n\r\n' + good + b"\r\n--x--\r\n"
    echoed = client.post("/predict", content=part, headers=form)
    assert echoed.status_code == 200
    assert echoed.json()["predictions"][0]["file"] == "\ud800", "names are data, whatever they are"
    form = {"Content-Type": "multipart/form-data"}
    assert "boundary" in problem(client.post("/predict", content=b"x", headers=form), 422)["error"]


def test_other_paths_methods_types_and_numbers_of_rows_are_refused_in_the_same_form(client):
    assert "GET /nothing" in problem(client.get("/nothing"), 404)["error"]
    assert "GET /predict" in problem(client.get("/predict"), 405)["error"]
    assert "application/json" in problem(client.post("/predict", data={"rows": "1"}), 415)["fix"]
    assert "at most 50 rows" in problem(client.post("/predict", json=[1] * 51), 413)["fix"]
    assert "query.top" in problem(client.post("/predict?top=0", json=[1]), 422)["error"]


def test_a_body_of_100_megabytes_is_refused_without_being_read(service):
    address = service[0].removeprefix("http://")
    announced = http.client.HTTPConnection(address, timeout=30)
    announced.putrequest("POST", "/predict")
    announced.putheader("Content-Type", "application/json")
    announced.putheader("Content-Length", "100000000")
    announced.endheaders()
    response = announced.getresponse()  # before a byte of the body was sent
    assert (response.status, response.getheader("Connection")) == (413, "close")
    assert "at most 1,000,000 bytes" in json.loads(response.read())["fix"]

    chunked = http.client.HTTPConnection(address, timeout=30)
    chunked.putrequest("POST", "/predict")
    chunked.putheader("Content-Type", "application/json")
    chunked.putheader("Transfer-Encoding", "chunked")
    chunked.endheaders()
    part, sent = b"10000\r\n" + b" " * 2**16 + b"\r\n", 0
    try:
        while sent < 100_000_000:
            chunked.send(part)
            sent += len(part)
    except OSError:
        pass
    assert sent < 30_000_000, "sockets buffer a few megabytes, but the rest was read"
    response = chunked.getresponse()
    assert response.status == 413
    assert "more than 1,000,000 bytes" in json.loads(response.read())["error"]
    announced.close()
    chunked.close()


def test_the_run_is_described_and_names_of_a_run_are_never_html(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "<script>alert(1)<-script>")
    with serving(copy) as (url, _):
        model = httpx.get(f"{url}/model").json()
        page = httpx.get(f"{url}/docs")
        health = httpx.get(f"{url}/health")
        metrics = httpx.get(f"{url}/metrics")
    assert model["run"] == copy.name
    assert model["classes"] == list("0123456789")
    assert model["metrics"] == ek.open_run(run).metrics
    assert model["calibration"].startswith("temperature")
    assert model["input"]["shape"] == [1, 8, 8]
    assert str(tmp_path) not in json.dumps(model)
    assert "&lt;script&gt;" in page.text
    assert "<script" not in page.text
    assert f"curl -F files=@first.png -F files=@second.png {url}/predict" in page.text
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert (health.status_code, health.json()) == (200, {"status": "ready"})
    assert 'ensemblekit_requests_total{path="/docs",status="200"} 1.0' in metrics.text
    assert "ensemblekit_request_seconds_bucket" in metrics.text
    assert "ensemblekit_queue_length 0.0" in metrics.text


def test_requests_beyond_the_queue_get_429_and_a_service_that_stops_answers_503(run, monkeypatch):
    entered, go = threading.Event(), threading.Event()
    answer = Batcher._answer

    def wait(self: Batcher, jobs: Any) -> None:
        entered.set()
        assert go.wait(30)
        answer(self, jobs)

    monkeypatch.setattr(Batcher, "_answer", wait)
    body, statuses = {"rows": [pixels(1, 8, 8)[None].tolist()]}, []
    with serving(run, max_queue=1) as (url, served):
        thread = threading.Thread(target=lambda: statuses.append(httpx.post(f"{url}/predict", json=body).status_code))
        thread.start()
        assert entered.wait(30)
        refused = httpx.post(f"{url}/predict", json=body)
        assert "try again" in problem(refused, 429)["fix"]
        assert refused.headers["Retry-After"] == "1"
        served.is_draining = True
        assert "stopping" in problem(httpx.get(f"{url}/health"), 503)["error"]
        stopping = httpx.post(f"{url}/predict", json=body)
        assert "stopping" in problem(stopping, 503)["error"]
        assert stopping.headers["Connection"] == "close"
        go.set()
        thread.join()
    assert statuses == [200]


def test_slow_clients_are_not_waited_for(run, monkeypatch):
    monkeypatch.setattr("ensemblekit.export.service.HEAD_SECONDS", 0.1)
    with serving(run, body_seconds=0.1) as (url, _):
        address = url.removeprefix("http://")
        body = http.client.HTTPConnection(address, timeout=30)
        body.putrequest("POST", "/predict")
        body.putheader("Content-Type", "application/json")
        body.putheader("Content-Length", "100")
        body.endheaders(b"[")
        assert body.getresponse().status == 408
        head = http.client.HTTPConnection(address, timeout=30)
        head.connect()
        head.send(b"POST /predict HTTP/1.1\r\nX-Slow: ")
        assert head.sock.recv(1) == b"", "the connection is closed"
        body.close()
        head.close()


def test_a_failure_inside_the_service_is_an_answer_too(run, monkeypatch, capfd):
    with serving(run) as (url, served):
        for error, status in [(RuntimeError("broken"), 500), (MemoryError(), 503)]:
            monkeypatch.setattr(served.batcher, "predict", lambda inputs, top, error=error: [error])
            problem(httpx.post(f"{url}/predict", json=[pixels(1, 8, 8)[None].tolist()]), status)
            labels = {"path": "/predict", "status": str(status)}
            assert served.metrics.registry.get_sample_value("ensemblekit_requests_total", labels) == 1
    assert "warning: a request failed: RuntimeError: broken" in capfd.readouterr().err


def test_the_service_keeps_what_its_openapi_document_promises(service):
    accepted = {"positive_data_acceptance": {"expected-statuses": ["2xx", "422"]}}  # 422: bytes that are no image
    config = SchemathesisConfig.from_dict({"checks": accepted})
    schema = schemathesis.openapi.from_url(f"{service[0]}/openapi.json", config=config)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} == {"/predict", "/health", "/model", "/metrics", "/docs"}
    few = settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def check(case: Any) -> None:
        case.call_and_validate()

    for operation in operations:
        modes = GenerationMode if operation.path == "/predict" else [GenerationMode.POSITIVE]
        for mode in modes:
            few(given(case=operation.as_strategy(mode))(check))()
