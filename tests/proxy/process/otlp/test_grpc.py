"""Pushes over gRPC to a real gRPC server with OpenTelemetry's service."""

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from kproxy.metrics import Metrics
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from kproxy.proxy.config.otlp import Otlp
from kproxy.proxy.process.otlp import grpc as otlp_grpc
from kproxy.proxy.process.otlp import push as otlp
from kproxy.proxy.process.otlp.push import OtlpPush
from tests.certificates import Authority
from tests.otlp import Collector, exposed, grpc_collector, series_of
from tests.ports import free_ports

SECRET = "hunter2"
LONG_S = 60.0  # timeout of pushes that succeed, also on a busy machine


def pushing(endpoint: str, **settings: Any) -> tuple[OtlpPush, Metrics]:
    metrics = Metrics()
    metrics.cluster("default").rewritten["Metadata"] = 3

    async def gather() -> Metrics:
        return metrics

    of = Otlp(endpoint=endpoint, **{"protocol": "grpc", "timeout_s": LONG_S, **settings})
    return OtlpPush(of, metrics, gather, 9092), metrics


def once(push: OtlpPush, times: int = 1) -> None:
    async def run() -> None:
        for _ in range(times):
            await push._push()

    asyncio.run(run())


def test_every_series_arrives_in_messages_that_collectors_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_grpc, "POINTS", 20)
    with grpc_collector() as here:
        push, metrics = pushing(f"http://127.0.0.1:{here.port}")
        once(push)
        assert metrics.otlp_pushes == {"success": 1, "failed": 0}
        of_metrics = exposed(render(registry_of(metrics))[0].decode())
        pushed = series_of(*here.pushes)
        sizes = [
            sum(len(getattr(metric, metric.WhichOneof("data")).data_points) for metric in scope.metrics)
            for message in here.pushes
            for of_resource in message.resource_metrics
            for scope in of_resource.scope_metrics
        ]
    assert set(sizes[:-1]) == {20} and 0 < sizes[-1] <= 20
    assert pushed.keys() == of_metrics.keys() and len(pushed) > 50
    key = "kproxy_rewritten_addresses_total", frozenset({("cluster", "default"), ("api", "Metadata")})
    assert pushed[key] == ("counter", 3.0)
    assert here.resource["service.name"] == "kproxy"


def test_many_series_are_split_into_messages_below_the_limit() -> None:
    """10,000 series with long labels have 4.5 MB, more than a collector accepts in one message."""
    with grpc_collector() as here:
        push, metrics = pushing(f"http://127.0.0.1:{here.port}", compression="none")
        for number in range(10_000):
            metrics.cluster("c" * 400 + str(number)).rewritten["Metadata"] = number
            if sum(1 for _ in metrics.clusters) > 300:
                break
        once(push)
    assert metrics.otlp_pushes["success"] == 1, metrics.otlp_pushes
    assert len(here.pushes) > 1 and sum(push.ByteSize() for push in here.pushes) > 4 << 20
    assert max(push.ByteSize() for push in here.pushes) < 4 << 20


def test_headers_come_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "headers"
    file.write_text(f"Authorization: Bearer {SECRET}\nx-scope: one\n")
    with grpc_collector() as here:
        push, _ = pushing(f"http://127.0.0.1:{here.port}", headers_file=file)
        once(push)
        file.write_text("Authorization: second\n")
        once(push)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=third")
        once(pushing(f"http://127.0.0.1:{here.port}")[0])
    sent = [headers for _, headers in here.requests]
    assert [headers["authorization"] for headers in sent] == [f"Bearer {SECRET}", "second", "third"]
    assert sent[0]["x-scope"] == "one"


def test_a_failure_is_logged_without_the_collectors_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "headers"
    file.write_text(f"Authorization: {SECRET}\n")
    for status in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        with grpc_collector() as here:
            here.refuses, here.body = status, f"no such token: {SECRET}".encode()
            push, metrics = pushing(f"http://127.0.0.1:{here.port}", headers_file=file)
            once(push, 2)
            assert metrics.otlp_pushes == {"success": 0, "failed": 2}
            here.refuses = None
            once(push)
            assert metrics.otlp_pushes["success"] == 1
        assert status.name in caplog.text
    assert SECRET not in caplog.text


def test_pushes_to_an_absent_or_hung_collector_fail_with_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    push, metrics = pushing(f"http://127.0.0.1:{free_ports(1)}", timeout_s=5.0)
    once(push)
    assert metrics.otlp_pushes["failed"] == 1 and "UNAVAILABLE: " in caplog.text and "refused" in caplog.text
    with socket.create_server(("127.0.0.1", 0)) as silent:
        push, metrics = pushing(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5)
        once(push)
    assert metrics.otlp_pushes["failed"] == 1 and "DEADLINE_EXCEEDED" in caplog.text


def test_the_exit_does_not_wait_for_a_hung_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "LAST_S", 0.2)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            push, metrics = pushing(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=60, interval_s=1)
            push.start()
            silent.setblocking(False)
            peer, _ = await asyncio.get_running_loop().sock_accept(silent)  # the push has begun
            with peer:
                await push.stop()
            assert metrics.otlp_pushes == {"success": 0, "failed": 0}

    asyncio.run(asyncio.wait_for(run(), 60))


def test_tls_with_a_ca_and_a_certificate_of_its_own(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    server, client = authority.server().settings(), authority.client("kproxy").settings()
    pair = Path(server["key"]).read_bytes(), Path(server["certificate"]).read_bytes()
    credentials = grpc.ssl_server_credentials([pair], authority.bundle.read_bytes(), require_client_auth=True)
    own = {"certificate": client["certificate"], "key": client["key"]}
    with grpc_collector(credentials) as here:
        for settings, outcome in (
            ({"timeout_s": 5.0}, "failed"),
            ({"ca": authority.bundle, "timeout_s": 5.0}, "failed"),
            ({"ca": authority.bundle, **own}, "success"),
        ):
            push, metrics = pushing(f"https://localhost:{here.port}", **settings)
            once(push)
            assert metrics.otlp_pushes[outcome] == 1, settings
    assert len(here.pushes) == 1


def test_port_4317_selects_grpc() -> None:
    """4317 is the port of OTLP over gRPC: a URL with it needs no protocol."""

    async def run(here: Collector) -> None:
        metrics = Metrics()

        async def gather() -> Metrics:
            return metrics

        of = Otlp(endpoint=f"http://127.0.0.1:{here.port}", interval_s=1, timeout_s=LONG_S)
        push = OtlpPush(of, metrics, gather, 9092)
        push.start()
        while len(here.pushes) < 2:  # noqa: ASYNC110 - a thread adds them
            await asyncio.sleep(0.02)
        await push.stop()

    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 4317)) == 0:
            pytest.skip("another program has port 4317")
    with grpc_collector(port=4317) as here:
        asyncio.run(asyncio.wait_for(run(here), 60))
