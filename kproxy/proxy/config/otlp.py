"""Settings of the push of kproxy's metrics to an OpenTelemetry collector: the table `[otlp]`, or only its URL.

`process/otlp/push.py` opens the files that the settings name. Refuses to know metrics.
"""

from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import BeforeValidator, Field, ValidationInfo

from kproxy.proxy.config.model import Frozen
from kproxy.proxy.config.tls import File

PATH = "/v1/metrics"  # path at which collectors accept metrics over HTTP
GRPC_PORT = 4317  # IANA's port for OTLP over gRPC; OTLP over HTTP has 4318
LIKE = "write it like http://collector:4318"
Protocol = Literal["http/protobuf", "grpc"]


def _endpoint(value: Any, known: ValidationInfo) -> str:
    """Return the collector's URL, with PATH if it needs one. Refuses a secret in it: logs contain the URL."""
    text = str(value).strip()
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise ValueError(f"it is no URL: {LIKE}") from None
    if url.username is not None or url.password is not None or url.query or url.fragment:
        raise ValueError("a secret in a URL ends in logs: put it into headers_file, and give the URL without it")
    if url.scheme not in ("http", "https") or not url.hostname or port == 0 or any(map(str.isspace, text)):
        raise ValueError(f"{text!r} is no URL of a collector: {LIKE}")
    has_path = bool(url.path.strip("/"))
    if has_path and known.data.get("protocol") == "grpc":
        raise ValueError("OTLP over gRPC has no path: give the URL without it, like http://collector:4317")
    return text if has_path else f"{text.rstrip('/')}{'' if _is_grpc(known.data.get('protocol'), url) else PATH}"


def _is_grpc(protocol: Protocol | None, url: SplitResult) -> bool:
    if protocol is not None:
        return protocol == "grpc"
    return url.port == GRPC_PORT and not url.path.strip("/")


class Otlp(Frozen):
    """`[otlp]`: the metrics of /metrics are pushed to a collector of OpenTelemetry, by OTLP over HTTP or gRPC."""

    protocol: Protocol | None = None  # default: grpc at port 4317, if the endpoint has no path; else http/protobuf
    # URL of the collector; https for TLS; over HTTP without a path, /v1/metrics of it
    endpoint: Annotated[str, BeforeValidator(_endpoint)]
    interval_s: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = 60.0  # seconds between two pushes
    # seconds for a push, including all attempts
    timeout_s: Annotated[float, Field(gt=0, le=300, allow_inf_nan=False)] = 10.0
    # file with a header for each line, like Authorization: Bearer ...; default: OTEL_EXPORTER_OTLP_HEADERS, as
    # OpenTelemetry defines it
    headers_file: File | None = None
    ca: File | None = None  # file of the CAs that vouch for the collector; default: those of Python's requests
    certificate: File | None = None  # file of the certificate that kproxy shows to the collector
    key: File | None = None  # file of its private key; default: the file of the certificate
    compression: Literal["gzip", "none"] = "gzip"  # of a push
    service_name: Annotated[str, Field(min_length=1)] = "kproxy"  # service.name of the pushed metrics
    # service.instance.id of the pushed metrics; default: the host's name and the port of the first cluster
    instance: Annotated[str, Field(min_length=1)] | None = None

    @property
    def is_grpc(self) -> bool:
        return _is_grpc(self.protocol, urlsplit(self.endpoint))


def of_endpoint(value: Any) -> Any:
    """Return a table with defaults for a text, which is the URL; any other value unchanged."""
    return {"endpoint": value} if isinstance(value, str) else value
