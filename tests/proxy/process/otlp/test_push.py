"""Pushes to a collector over HTTP, periodically and at exit: failures, secrets, TLS."""

import asyncio
import logging
import socket
import ssl
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from kproxy.errors import ConfigError
from kproxy.metrics import Metrics
from kproxy.proxy.config.otlp import Otlp
from kproxy.proxy.process.otlp import push as otlp
from kproxy.proxy.process.otlp.push import OtlpPush
from tests.certificates import Authority
from tests.otlp import Collector, collector, series_of
from tests.ports import free_ports

SECRET = "Bearer hunter2"
LONG_S = 60.0  # timeout of pushes that succeed, also on a busy machine


def pushing(endpoint: str, **settings: Any) -> tuple[OtlpPush, Metrics]:
    metrics = Metrics()
    metrics.cluster("default").rewritten["Metadata"] = 3

    async def gather() -> Metrics:
        return metrics

    return OtlpPush(Otlp(endpoint=endpoint, **{"timeout_s": LONG_S, **settings}), metrics, gather, 9092), metrics


def once(push: OtlpPush, times: int = 1) -> None:
    async def run() -> None:
        for _ in range(times):
            await push._push()

    asyncio.run(run())


def test_kproxy_pushes_at_its_interval_and_once_more_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "LAST_S", LONG_S)

    async def run(here: Collector) -> None:
        push, metrics = pushing(f"http://127.0.0.1:{here.port}", interval_s=1)
        push.start()
        while metrics.otlp_pushes["success"] < 2:  # noqa: ASYNC110 - a thread adds them
            await asyncio.sleep(0.02)
        metrics.cluster("default").rewritten["Metadata"] = 7
        counted = metrics.otlp_pushes["success"]
        await push.stop()
        assert metrics.otlp_pushes == {"success": counted + 1, "failed": 0} and metrics.otlp_pushed_ns

    with collector() as here:
        asyncio.run(asyncio.wait_for(run(here), 60))
        key = "kproxy_rewritten_addresses_total", frozenset({("cluster", "default"), ("api", "Metadata")})
        assert ("counter", 7.0) in [series_of(each)[key] for each in here.pushes]  # a push may have been in flight
        assert here.resource["service.name"] == "kproxy" and here.resource["service.instance.id"].endswith(":9092")
        assert {path for path, _ in here.requests} == {"/v1/metrics"}
        assert here.requests[0][1]["content-encoding"] == "gzip"


def test_headers_are_read_from_their_file_for_each_push_and_never_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "headers"
    file.write_text(f"# of the collector\n\nAuthorization: {SECRET}\nx-scope: one\n")
    with collector() as here:
        push, metrics = pushing(f"http://127.0.0.1:{here.port}/otlp", headers_file=file, service_name="gateway")
        once(push)
        file.write_text("Authorization: Bearer second\n")
        once(push)
        here.status, here.body = 401, b"no: " + SECRET.encode()
        once(push, 3)
    assert [headers["authorization"] for _, headers in here.requests[:3]] == [SECRET, *["Bearer second"] * 2]
    assert here.requests[0][1]["x-scope"] == "one" and here.requests[0][0] == "/otlp"
    assert here.resource["service.name"] == "gateway"
    assert metrics.otlp_pushes == {"success": 2, "failed": 3}
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1 and "401" in lines[0] and f"{here.port}/otlp" in lines[0]
    assert "hunter2" not in caplog.text and "second" not in caplog.text


def test_a_failure_is_logged_once_until_a_push_succeeds_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    push, metrics = pushing(f"http://127.0.0.1:{free_ports(1)}", timeout_s=0.3)
    once(push, 2)
    assert metrics.otlp_pushes == {"success": 0, "failed": 2}
    with collector() as here:
        for here.status, timeout_s, times in ((200, LONG_S, 2), (503, 0.3, 1)):
            push._settings = push._exporter._settings = Otlp(
                endpoint=f"http://127.0.0.1:{here.port}", timeout_s=timeout_s
            )
            push._exporter.hurry()
            once(push, times)
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO", "ERROR"]
    assert caplog.messages[0].endswith("metrics cannot be pushed: Connection refused: no collector listens there")
    assert "again" in caplog.messages[1]


def test_a_redirect_is_not_followed_with_the_headers(tmp_path: Path) -> None:
    (tmp_path / "headers").write_text(f"api-key: {SECRET}\n")
    with collector() as here:
        push, metrics = pushing(f"http://127.0.0.1:{here.port}", headers_file=tmp_path / "headers")
        for here.status in (302, 307):
            once(push)
    assert {path for path, _ in here.requests} == {"/v1/metrics"} and metrics.otlp_pushes["failed"] == 2


def test_a_hung_collector_delays_neither_the_loop_nor_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "LAST_S", 0.2)

    async def run() -> int:
        server = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
        push, metrics = pushing(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=30, interval_s=1)
        push.start()
        turns = 0
        for _ in range(100):
            await asyncio.sleep(0.001)
            turns += 1
        await push.stop()
        assert metrics.otlp_pushes == {"success": 0, "failed": 0}
        server.close()
        return turns

    assert asyncio.run(run()) == 100


def test_a_stop_at_the_moment_a_push_completes_takes_effect() -> None:
    """If both happen in one turn of the loop, asyncio.wait_for of Python 3.11 returns and loses the cancellation."""

    async def run() -> None:
        push, _ = pushing("http://127.0.0.1:1", interval_s=1)
        exported: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        began = asyncio.Event()

        def begin(_: Metrics) -> "asyncio.Future[str]":
            began.set()
            return exported

        push._on_a_thread = begin  # type: ignore[method-assign]
        push.start()
        await began.wait()
        await asyncio.sleep(0)  # it waits for the push
        exported.set_result("")
        await asyncio.wait_for(push._tasks.cancel(), 10)

    asyncio.run(run())


def _answering(parts: Iterable[bytes]) -> tuple[int, Thread]:
    """The port of a collector that answers one push with these parts until the client closes."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with server, suppress(OSError):
            peer, _ = server.accept()
            with peer:
                peer.recv(65536)
                for part in parts:
                    peer.sendall(part)

    thread = Thread(target=answer, daemon=True)
    thread.start()
    return server.getsockname()[1], thread


@pytest.mark.parametrize(("status", "outcome"), [(b"200 OK", "success"), (b"302 Found\r\nLocation: /x", "failed")])
def test_the_body_of_a_response_is_not_read(status: bytes, outcome: str) -> None:
    parts = [b"HTTP/1.1 " + status + b"\r\n\r\n", *[bytes(1 << 20)] * 256]
    port, collector_thread = _answering(parts)
    push, metrics = pushing(f"http://127.0.0.1:{port}", timeout_s=30)
    tracemalloc.start()
    once(push)
    collector_thread.join()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert metrics.otlp_pushes[outcome] == 1 and peak < 32 << 20


def test_a_response_byte_by_byte_times_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ended = Event()

    def parts() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nX: "
        while not ended.wait(0.05):
            yield b"x"

    monkeypatch.setattr(
        otlp, "SLACK_S", 0.5 - 2 * LONG_S
    )  # the whole response may take 0.5 s, each byte longer, also on a busy machine
    port, collector_thread = _answering(parts())
    push, metrics = pushing(f"http://127.0.0.1:{port}")
    once(push, 2)
    assert metrics.otlp_pushes == {"success": 0, "failed": 2} and "has not ended after 0.5 s" in caplog.text
    ended.set()
    collector_thread.join()
    push._exporter.hurry()  # it does not wait for another listener there
    assert push._thread is not None
    push._thread.join()
    once(push)
    assert push._is_failing and metrics.otlp_pushes["failed"] == 3


def test_no_header_is_logged_whatever_the_response_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "headers"
    file.write_text(f"Authorization: {SECRET}\n")
    port, _ = _answering([b"HTTP/1.1 401 no such token: hunter2\r\nContent-Length: 0\r\n\r\n"])
    once(pushing(f"http://127.0.0.1:{port}", headers_file=file)[0])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"Authorization {SECRET}")
    once(pushing(f"http://127.0.0.1:{free_ports(1)}", timeout_s=0.1)[0])
    assert "it answered 401 Unauthorized" in caplog.text and "Header format invalid" in caplog.text
    assert "hunter2" not in caplog.text


def test_tls_with_a_ca_and_a_certificate_of_its_own(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    server, client = authority.server().settings(), authority.client("kproxy").settings()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.bundle)
    context.load_cert_chain(server["certificate"], server["key"])
    context.verify_mode = ssl.CERT_REQUIRED
    with collector(context) as here:
        url = f"https://localhost:{here.port}"
        own = {"certificate": client["certificate"], "key": client["key"]}
        for settings, outcome in (
            ({"timeout_s": 1.0}, "failed"),
            ({"ca": authority.bundle, "timeout_s": 1.0}, "failed"),
            ({"ca": authority.bundle, **own}, "success"),
        ):
            push, metrics = pushing(url, **settings)
            once(push)
            assert metrics.otlp_pushes[outcome] == 1, settings
    assert len(here.pushes) == 1


@pytest.mark.parametrize("name", ["headers_file", "ca", "certificate", "key"])
def test_missing_files_are_reported_at_the_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"otlp: {name}: .*absent cannot be read: No such file"):
        pushing("http://localhost:4318", **{name: tmp_path / "absent"})


def test_an_invalid_header_is_reported_by_its_line_number(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("a: b\nhunter2\n")
    with pytest.raises(ConfigError, match="line 2 is no header") as refused:
        pushing("http://localhost:4318", headers_file=file)
    assert "hunter2" not in str(refused.value)


def test_headers_without_tls_cause_a_warning_unless_the_collector_is_local(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "headers").write_text("a: b\n")
    for url, warned in (("http://127.0.0.1:1", 0), ("https://collector", 0), ("http://collector", 1)):
        caplog.clear()
        pushing(url, headers_file=tmp_path / "headers")
        assert len(caplog.records) == warned
