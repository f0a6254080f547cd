"""Push of kproxy's metrics to an OpenTelemetry collector at an interval, with the content of a scrape.

A push runs on a thread, except for gathering the cells. There is one push at a time: while a collector is slow or
down, due pushes are skipped. A failed push is counted, and logged once until one succeeds; nothing is lost, since
values are cumulative. kproxy reads headers, which may have secrets, from their file for each push, and logs neither
headers nor responses of the collector. Bounds: `timeout_s` for a push, LAST_S for the last one. If a collector sends
its response byte by byte, a push is abandoned after twice its timeout and SLACK_S; the next ones fail until it ends.
Refuses to know metrics.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kproxy import __version__
from kproxy.addresses import numeric
from kproxy.errors import ConfigError, install_command
from kproxy.metrics import Metrics
from kproxy.proxy.config.files import open_regular
from kproxy.proxy.config.otlp import Otlp
from kproxy.proxy.tasks import Tasks

if TYPE_CHECKING:
    from kproxy.proxy.process.otlp.exporter import Exporter
    from kproxy.proxy.process.otlp.grpc import GrpcExporter

OUTCOMES = ("success", "failed")
LAST_S = 3.0  # s for the last push
SLACK_S = 5.0  # s for serializing metrics, added to the time after which a push is abandoned
MAX_HEADERS_BYTES = 64 * 1024
MAX_REASON = 300  # characters
_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS")

log = logging.getLogger("kproxy.otlp")


class OtlpPush:
    """Pushes the metrics that `gather` returns. port: distinguishes several kproxies of one host.

    Raises ConfigError for files that cannot be used, or without the extra `otlp`.
    """

    def __init__(self, settings: Otlp, metrics: Metrics, gather: Callable[[], Awaitable[Metrics]], port: int) -> None:
        self._settings = settings
        self._gather = gather
        self._metrics = metrics
        self._outcomes = metrics.otlp_pushes
        self._outcomes.update(dict.fromkeys(OUTCOMES, 0))
        self._exporter = _exporter(settings)
        for name, path in (("ca", settings.ca), ("certificate", settings.certificate), ("key", settings.key)):
            if path is not None:
                _read(f"otlp: {name}", path, 1)
        self._headers()
        self._tasks = Tasks("otlp")
        self._is_failing = False
        self._thread: Thread | None = None
        self._resource = {
            "service.name": settings.service_name,
            "service.version": __version__,
            "service.instance.id": settings.instance or f"{socket.gethostname()}:{port}",
        }
        self._warn_of_plaintext()

    def start(self) -> None:
        """Start pushing."""
        log.info("otlp endpoint=%s interval_s=%g", self._settings.endpoint, self._settings.interval_s)
        self._tasks.spawn(self._run())

    async def stop(self) -> None:
        """Push once more, for at most LAST_S, and end."""
        await self._tasks.cancel()
        self._exporter.hurry()
        self._thread = None
        try:
            async with asyncio.timeout(LAST_S):
                await self._push()
        except TimeoutError:
            log.warning("otlp: the last push was aborted after %g s", LAST_S)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self._push()
            taken_s = loop.time() - began
            interval_s = self._settings.interval_s
            await asyncio.sleep(interval_s - taken_s % interval_s)

    async def _push(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            fault = "an earlier push has not ended"
        else:
            bound_s = 2 * self._settings.timeout_s + SLACK_S  # connecting and the response each have `timeout_s`
            metrics = await self._gather()
            try:
                async with asyncio.timeout(bound_s):
                    fault = await self._on_a_thread(metrics)
                self._thread = None  # it has done its work
            except TimeoutError:
                fault = f"its answer has not ended after {bound_s:g} s"
        self._outcomes["failed" if fault else "success"] += 1
        if not fault:
            self._metrics.otlp_pushed_ns = time.time_ns()
        if bool(fault) != self._is_failing:
            self._is_failing = bool(fault)
            if fault:
                log.error("otlp endpoint=%s: metrics cannot be pushed: %s", self._settings.endpoint, fault)
            else:
                log.info("otlp endpoint=%s: metrics are pushed again", self._settings.endpoint)

    def _on_a_thread(self, metrics: Metrics) -> "asyncio.Future[str]":
        """Return why the push failed, or "". The process does not wait for the thread when it ends."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str] = loop.create_future()

        def finish(fault: str) -> None:
            if not done.done():
                done.set_result(fault)

        def export() -> None:
            fault = self._export(metrics)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, fault)

        self._thread = Thread(target=export, name="otlp", daemon=True)
        self._thread.start()
        return done

    def _export(self, metrics: Metrics) -> str:
        """Push, on the thread; return why it failed, or ""."""
        try:
            from kproxy.metrics.scrape.collector import registry_of

            headers = self._headers()
            families = registry_of(metrics).collect()
            return self._exporter.push(families, self._resource, metrics.started_ns, headers)[:MAX_REASON]
        except ConfigError as fault:
            return str(fault)
        except Exception as fault:  # an exception of a library: log it and continue
            return f"{type(fault).__name__}: {fault}"[:MAX_REASON]

    def _headers(self) -> Mapping[str, str] | None:
        """Return the headers of each push; None: the exporter takes those of the environment."""
        path = self._settings.headers_file
        if path is None:
            return None
        try:
            text = _read("otlp: headers_file", path, MAX_HEADERS_BYTES).decode()
        except UnicodeDecodeError:
            raise ConfigError([("otlp: headers_file", f"{path} is no text")]) from None
        headers: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            name, colon, value = line.partition(":")
            if not line.strip() or line.startswith("#"):
                continue
            if not colon or not name.strip().replace("-", "").replace("_", "").isalnum() or not name.isascii():
                raise ConfigError([("otlp: headers_file", f"{path}: line {number} is no header like NAME: VALUE")])
            headers[name.strip()] = value.strip()
        return headers

    def _warn_of_plaintext(self) -> None:
        host = urlsplit(self._settings.endpoint).hostname or ""
        address = numeric(host)
        is_here = host == "localhost" or (address is not None and address.is_loopback)
        has_headers = self._settings.headers_file is not None or any(map(os.environ.get, _VARIABLES))
        if has_headers and not is_here and self._settings.endpoint.startswith("http:"):
            log.warning("otlp endpoint=%s: headers are sent unencrypted: use https", self._settings.endpoint)


def _exporter(settings: Otlp) -> "Exporter | GrpcExporter":
    """Return the exporter. Raises ConfigError that names the missing extra."""
    extra = "otlp-grpc" if settings.is_grpc else "otlp"
    try:
        if settings.is_grpc:
            from kproxy.proxy.process.otlp.grpc import GrpcExporter

            return GrpcExporter(settings)
        from kproxy.proxy.process.otlp.exporter import Exporter

        return Exporter(settings)
    except ModuleNotFoundError as fault:
        text = f"it needs {fault.name}, which is not installed: {install_command(extra)}"
        raise ConfigError([("otlp", text)]) from None


def _read(place: str, path: Path, limit_bytes: int) -> bytes:
    """Return the first bytes of a file. Raises ConfigError."""
    try:
        with open_regular(path) as file:
            return file.read(limit_bytes)
    except OSError as fault:
        raise ConfigError([(place, f"{path} cannot be read: {fault.strerror or fault}")]) from None
