"""What the service counts about itself, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class ServiceMetrics:
    """Counters of one service.

    Args:
        queue_length: returns the number of requests that wait.
    """

    def __init__(self, queue_length: Callable[[], int]) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "ensemblekit_requests", "Requests that were answered.", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            "ensemblekit_request_seconds",
            "Time from the head of a request to its answer.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_size = Histogram(
            "ensemblekit_batch_size", "Samples that were predicted at once.", buckets=SIZES, registry=registry
        )
        length = Gauge("ensemblekit_queue_length", "Requests that wait to be predicted.", registry=registry)
        length.set_function(queue_length)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self.registry)
