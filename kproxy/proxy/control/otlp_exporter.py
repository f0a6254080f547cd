"""OpenTelemetry's exporter of metrics over HTTP, as `otlp.py` needs it: quiet, and without surprises.

It says only that a push failed; why, its session knows. Redirects are not followed: headers would go to whoever is
named there. Needs the extra `otlp`. Refuses to know when pushes are made.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from prometheus_client import Metric

from kproxy.metrics.otlp import metrics_data
from kproxy.proxy.config.otlp import Otlp

# Its lines are not limited and may repeat what a collector answers; what they say is in those of `otlp.py`.
logging.getLogger("opentelemetry.exporter.otlp.proto.http.metric_exporter").addFilter(lambda _: False)


class _Session(requests.Session):
    """Knows how the last request ended; never what was answered, which may repeat a header."""

    def __init__(self) -> None:
        super().__init__()
        self.max_redirects = 0
        self.fault = ""

    def request(self, *arguments: Any, **named: Any) -> requests.Response:
        if self.verify is not True:  # as an argument, REQUESTS_CA_BUNDLE does not replace it
            named["verify"] = self.verify
        try:
            response = super().request(*arguments, **named)
        except Exception as fault:
            self.fault = str(fault)
            raise
        self.fault = f"it answered {response.status_code} {response.reason}"
        return response


class Exporter:
    """Pushes to one collector, one push at a time."""

    def __init__(self, settings: Otlp) -> None:
        self._settings = settings
        self._headers: Mapping[str, str] | None = None
        self._made: tuple[OTLPMetricExporter, _Session] | None = None

    def push(
        self,
        families: Iterable[Metric],
        resource: Mapping[str, str],
        started_ns: int,
        headers: Mapping[str, str] | None,
    ) -> str:
        """Push these families; returns why that failed, or nothing."""
        made = self._made
        if made is None or headers != self._headers:
            made = self._made = self._make(headers)
            self._headers = headers
        exporter, session = made
        data = metrics_data(families, resource, started_ns, time.time_ns())
        if exporter.export(data) is MetricExportResult.SUCCESS:
            return ""
        return session.fault or "it was not sent"

    def hurry(self) -> None:
        """What is under way is not tried again; another push may follow."""
        made, self._made = self._made, None
        if made is not None:
            made[0].shutdown()

    def _make(self, headers: Mapping[str, str] | None) -> tuple[OTLPMetricExporter, _Session]:
        settings = self._settings
        session = _Session()
        certificate = str(settings.certificate) if settings.certificate is not None else None
        key = settings.key or settings.certificate
        exporter = OTLPMetricExporter(
            endpoint=settings.endpoint,
            certificate_file=str(settings.ca) if settings.ca is not None else None,
            client_certificate_file=certificate,
            client_key_file=str(key) if key is not None else None,
            headers=dict(headers) if headers is not None else None,
            timeout=settings.timeout_s,
            compression=Compression.Gzip if settings.compression == "gzip" else Compression.NoCompression,
            session=session,
        )
        return exporter, session
