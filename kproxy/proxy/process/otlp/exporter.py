"""OpenTelemetry's exporter of metrics over HTTP for `push.py`: without log lines, redirects or response bodies.

OpenTelemetry's exporter reports only that a push failed; the session keeps the reason. It follows no redirect, which
would send the headers to another host. It reads only the head of a response, as a body could be endless. Needs the
extra `otlp`. Refuses to know when pushes are made.
"""

import logging
import ssl
import time
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from prometheus_client import Metric

from kproxy.metrics.scrape.otlp import metrics_data
from kproxy.proxy.config.otlp import Otlp

# Its log lines are not limited and may repeat a collector's response; `push.py` logs the reason of each failure.
logging.getLogger("opentelemetry.exporter.otlp.proto.http.metric_exporter").addFilter(lambda _: False)


def _hide_arguments(record: logging.LogRecord) -> bool:
    record.args = ("its value is not shown, since it may be a secret",) if record.args else record.args
    return True


# The parser of OTEL_EXPORTER_OTLP_HEADERS logs each header that it does not understand.
logging.getLogger("opentelemetry.util.re").addFilter(_hide_arguments)

_DEEPEST = 10  # exceptions to follow in a chain of causes
_PHRASES = {status.value: f" {status.phrase}" for status in HTTPStatus}


class _Session(requests.Session):
    """Keeps the reason why the last request failed, never the response, which may repeat a header."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = ""

    def request(self, *arguments: Any, **named: Any) -> requests.Response:
        if self.verify is not True:  # passed as an argument, it takes precedence over REQUESTS_CA_BUNDLE
            named["verify"] = self.verify
        named["stream"] = True
        try:
            response = super().request(*arguments, **named)
        except Exception as fault:
            self.fault = _why(fault)
            raise
        response.close()
        response.raw = None  # drop the body
        self.fault = f"it answered {response.status_code}{_PHRASES.get(response.status_code, '')}"
        if response.is_redirect:
            raise requests.TooManyRedirects(self.fault, response=response)
        return response

    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return None, which prevents redirects: following one would read the body first."""


def _why(fault: BaseException) -> str:
    """Return the reason from the operating system or TLS at the root of an exception, else the exception's own text."""
    each: BaseException | None = fault
    for _ in range(_DEEPEST):
        if each is None:
            break
        if isinstance(each, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({each.verify_message}): set `ca` to the CA that signed it"
        if isinstance(each, ConnectionRefusedError):
            return f"{each.strerror}: no collector listens there"
        if isinstance(each, OSError) and each.strerror and not isinstance(each, requests.RequestException):
            return str(each.strerror)
        each = each.__cause__ or each.__context__
    return str(fault)


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
        """Push these families; returns why that failed, or ""."""
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
        """Stop retries of the current push; another one may follow."""
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
