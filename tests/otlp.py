"""Collectors of OpenTelemetry for tests, over HTTP and gRPC: OpenTelemetry's own messages and service."""

import gzip
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Series = dict[tuple[str, Labels], tuple[str, Any]]  # (type, value) by name and labels; of a histogram its samples


class Collector:
    """What has arrived; `status` is what is answered."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b""
        self.refuses: grpc.StatusCode | None = None  # over gRPC
        self.requests: list[tuple[str, dict[str, str]]] = []  # path and headers
        self.pushes: list[Any] = []
        self.port = 0

    @property
    def resource(self) -> dict[str, str]:
        attributes = self.pushes[-1].resource_metrics[0].resource.attributes
        return {attribute.key: attribute.value.string_value for attribute in attributes}

    def series(self) -> Series:
        """Every series of the last push."""
        return series_of(self.pushes[-1])


def series_of(*messages: Any) -> Series:
    """Every series of these messages, each of which is in one of them."""
    found: Series = {}
    for message in messages:
        (of_resource,) = message.resource_metrics
        (scope,) = of_resource.scope_metrics
        for metric in scope.metrics:
            kind = metric.WhichOneof("data")
            data = getattr(metric, kind)
            if kind == "sum":
                assert data.is_monotonic and data.aggregation_temporality == 2
                kind = "counter"
            for point in data.data_points:
                labels = frozenset((attribute.key, attribute.value.string_value) for attribute in point.attributes)
                value: Any = point.as_double if kind != "histogram" else _samples(point)
                assert (metric.name, labels) not in found
                found[metric.name, labels] = kind, value
                assert kind == "gauge" or 0 < point.start_time_unix_nano <= point.time_unix_nano
    return found


def exposed(text: str) -> Series:
    """The series of /metrics as a collector has them."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset((name, value) for name, value in sample.labels.items() if name != "le")
            if family.type == "histogram":
                part = sample.name.removeprefix(f"{family.name}_")
                part = str(float(sample.labels["le"])) if part == "bucket" else part
                found.setdefault((family.name, labels), ("histogram", {}))[1][part] = sample.value
            else:
                assert family.type in ("counter", "gauge")
                found[sample.name, labels] = family.type, sample.value
    return found


def _samples(point: Any) -> dict[str, float]:
    samples = {"count": float(point.count), "sum": point.sum}
    total = 0
    for bound, count in zip((*point.explicit_bounds, float("inf")), point.bucket_counts, strict=True):
        total += count
        samples[str(bound)] = float(total)
    return samples


@contextmanager
def collector(tls: ssl.SSLContext | None = None) -> Iterator[Collector]:
    here = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            here.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            if self.headers["Content-Encoding"] == "gzip":
                data = gzip.decompress(data)
            if here.status == 200:
                assert self.headers["Content-Type"] == "application/x-protobuf"
                here.pushes.append(ExportMetricsServiceRequest.FromString(data))
            self.send_response(here.status)
            if here.status in (302, 307):
                self.send_header("Location", f"http://127.0.0.1:{here.port}/elsewhere")
            self.send_header("Content-Length", str(len(here.body)))
            self.end_headers()
            self.wfile.write(here.body)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    here.port = server.server_address[1]
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield here
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Service(MetricsServiceServicer):  # type: ignore[misc]
    def __init__(self, here: Collector) -> None:
        self._here = here

    def Export(self, request: Any, context: Any) -> ExportMetricsServiceResponse:
        here = self._here
        here.requests.append(("Export", dict(context.invocation_metadata())))
        if here.refuses is not None:
            context.abort(here.refuses, here.body.decode())
        here.pushes.append(request)
        return ExportMetricsServiceResponse()


@contextmanager
def grpc_collector(tls: grpc.ServerCredentials | None = None, port: int = 0) -> Iterator[Collector]:
    """With grpc's own server, whose messages have 4 MiB at most, as in collectors."""
    here = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_MetricsServiceServicer_to_server(_Service(here), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{port}"
    here.port = server.add_secure_port(address, tls) if tls is not None else server.add_insecure_port(address)
    server.start()
    try:
        yield here
    finally:
        server.stop(None).wait()
