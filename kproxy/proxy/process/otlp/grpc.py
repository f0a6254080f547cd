"""OTLP over gRPC for `push.py`: OpenTelemetry's messages and service over a channel of grpcio.

Each push has a channel of its own: renewed certificates are used, nothing runs between pushes, and there is no gRPC
state when a process forks. kproxy does not use OpenTelemetry's own exporter: it logs the collector's response, which
may repeat a header, and takes settings from the environment that would contradict kproxy's. Bounds: POINTS per message,
as collectors limit a message to 4 MiB; MAX_ANSWER_BYTES of a response; `timeout_s` of a push. Needs the extra
`otlp-grpc`. Refuses to know when pushes are made.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os import environ
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.sdk.metrics.export import Metric, MetricsData
from opentelemetry.util.re import parse_env_headers
from prometheus_client import Metric as Family

from kproxy.metrics.scrape.otlp import metrics_data
from kproxy.proxy.config.otlp import Otlp

POINTS = 4000  # per message: 2 MB of histograms, 1 MB of other metrics
MAX_ANSWER_BYTES = 64 * 1024
VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_metadata_size", MAX_ANSWER_BYTES),
    ("grpc.enable_retries", 0),  # the next push is complete
)
# The starts of grpcio's own messages when it reached no collector; nothing else distinguishes them from a response's.
_OURS = ("failed to connect to all addresses", "DNS resolution failed")


class GrpcExporter:
    """Pushes to one collector, one push at a time."""

    def __init__(self, settings: Otlp) -> None:
        self._settings = settings
        self._channel: grpc.Channel | None = None

    def push(
        self,
        families: Iterable[Family],
        resource: Mapping[str, str],
        started_ns: int,
        headers: Mapping[str, str] | None,
    ) -> str:
        """Push these families; returns why that failed, or ""."""
        settings = self._settings
        data = metrics_data(families, resource, started_ns, time.time_ns())
        sent = _metadata(_of_environment() if headers is None else headers)
        ends = time.monotonic() + settings.timeout_s
        with self._open() as channel:
            self._channel = channel
            stub = MetricsServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                for portion in portions(data, POINTS):
                    stub.Export(encode_metrics(portion), metadata=sent, timeout=max(0.001, ends - time.monotonic()))
            except grpc.RpcError as fault:
                return _reason(fault)
            finally:
                self._channel = None
        return ""

    def hurry(self) -> None:
        """Abort the current push; another one may follow."""
        channel = self._channel
        if channel is not None:
            channel.close()

    def _open(self) -> grpc.Channel:
        settings = self._settings
        url = urlsplit(settings.endpoint)
        target = url.netloc if url.port else f"{url.netloc}:{443 if url.scheme == 'https' else 80}"
        compression = grpc.Compression.Gzip if settings.compression == "gzip" else grpc.Compression.NoCompression
        if url.scheme == "http":
            return grpc.insecure_channel(target, options=_OPTIONS, compression=compression)
        key = settings.key or settings.certificate
        credentials = grpc.ssl_channel_credentials(
            root_certificates=settings.ca.read_bytes() if settings.ca is not None else None,
            private_key=key.read_bytes() if key is not None else None,
            certificate_chain=settings.certificate.read_bytes() if settings.certificate is not None else None,
        )
        return grpc.secure_channel(target, credentials, options=_OPTIONS, compression=compression)


def portions(data: MetricsData, most: int) -> Iterator[MetricsData]:
    """Yield the metrics, as made by `metrics_data`, in messages of at most `most` points."""
    (of_resource,) = data.resource_metrics
    (scope,) = of_resource.scope_metrics

    def message(metrics: list[Metric]) -> MetricsData:
        return MetricsData([replace(of_resource, scope_metrics=[replace(scope, metrics=metrics)])])

    held: list[Metric] = []
    room = most
    for metric in scope.metrics:
        points = list(metric.data.data_points)
        while points:
            if not room:
                yield message(held)
                held, room = [], most
            part, points = points[:room], points[room:]
            held.append(replace(metric, data=replace(metric.data, data_points=part)))  # type: ignore[arg-type]
            room -= len(part)
    if held:
        yield message(held)


def _reason(fault: Any) -> str:
    """Return grpcio's own reason, or only the status of a collector's response, whose text may repeat a header."""
    name, details = fault.code().name, fault.details() or ""
    return f"{name}: {details}" if details.startswith(_OURS) else f"the status was {name}"


def _metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str | bytes], ...]:
    """Return headers as gRPC requires: lower-case names, and bytes for names that end in "-bin"."""
    named = ((name.lower(), value) for name, value in headers.items())
    return tuple((name, value.encode() if name.endswith("-bin") else value) for name, value in named)


def _of_environment() -> Mapping[str, str]:
    for name in VARIABLES:
        if environ.get(name):
            return parse_env_headers(environ[name], liberal=True)
    return {}
