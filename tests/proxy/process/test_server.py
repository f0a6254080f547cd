"""`kproxy run` as a process: its output, its exit status, its reaction to signals."""

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow.parquet
import pytest

from kproxy.errors import install_command
from kproxy.proxy.config.load import load
from kproxy.proxy.process.server import Server
from tests.proxy.live import HOST, Broker, Wire, free_ports, live, request, response

KPROXY = Path(sys.executable).with_name("kproxy")


_started: list[asyncio.subprocess.Process] = []


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Whatever a test that fails has started."""
    yield
    while _started:
        process = _started.pop()
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)


async def run(*arguments: str, files: int | None = None, **variables: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(KPROXY, "run", *arguments),
        env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ} | variables,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=files and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))),
    )
    _started.append(process)
    return process


async def said(process: asyncio.subprocess.Process, text: str) -> str:
    """Return the next line that contains the text."""
    assert process.stderr is not None
    async for line in process.stderr:
        if text in line.decode():
            return line.decode()
    raise AssertionError(f"it ended without saying {text!r}")


def test_faults_of_the_settings_are_lines_and_not_a_stack():
    async def test():
        process = await run("--listen", "9092", KPROXY_ADMIN="here")
        _, stderr = await process.communicate()
        assert process.returncode == 2
        assert stderr.decode().splitlines() == [
            "kproxy:",
            "--listen: '9092' is not HOST:PORT (IPv6: [ADDRESS]:PORT)",
            "bootstrap: is missing: give --bootstrap HOST:PORT, KPROXY_BOOTSTRAP or, in [[cluster]], bootstrap",
            "KPROXY_ADMIN: 'here' is not HOST:PORT (IPv6: [ADDRESS]:PORT)",
        ]

    live(test())


def test_without_free_descriptors_clients_wait_and_are_not_closed():
    """Two files each: who is accepted must be able to have its broker."""

    async def test():
        broker = Broker()
        port = free_ports(3)
        process = await run("--listen", f"{HOST}:{port}", "--bootstrap", f"{HOST}:{broker.port}", files=60)
        assert "enough for 15 connections" in await said(process, "kproxy")
        await broker.answer_kproxy()
        await said(process, "ready cluster=default")

        async def serve(wire: Wire) -> None:
            await wire.frame()
            await wire.send(response(12, 4, 1))

        async def ask(client: Wire) -> None:
            await client.send(request(12, 4, 1))
            assert await client.frame() == response(12, 4, 1)
            client.close()  # and lets another in

        clients = [await Wire.dial(port) for _ in range(40)]
        asking = [asyncio.create_task(ask(client)) for client in clients]
        await asyncio.gather(*[asyncio.create_task(serve(await broker.accept())) for _ in clients], *asking)
        process.send_signal(signal.SIGTERM)
        await process.wait()

    live(test())


@pytest.mark.parametrize("again", [False, True])
def test_sigterm_drains_and_a_second_one_does_not_wait(again):
    async def test():
        broker = Broker()
        port = free_ports(3)
        process = await run("--listen", f"{HOST}:{port}", KPROXY_BOOTSTRAP=f"{HOST}:{broker.port}")
        await broker.answer_kproxy()
        assert f"brokers=1:{port + 2}" in await said(process, "ready cluster=default")
        client = await Wire.dial(port)
        await client.send(request(12, 4, 1))
        wire = await broker.accept()
        await wire.frame()
        process.send_signal(signal.SIGTERM)
        await said(process, "SIGTERM: draining")
        assert await client.is_silent(0.2)
        if again:
            process.send_signal(signal.SIGTERM)
            await said(process, "SIGTERM: closing at once")
        else:
            wire.close()
        assert await client.rest() == b""
        client.close()
        assert await process.wait() == 0

    live(test())


def test_the_log_says_when_it_is_done_and_a_late_signal_changes_no_status():
    """A loop that ends gives signals their default back: one in the last milliseconds would kill the process."""

    async def test():
        broker = Broker()
        for _ in range(2):
            port = free_ports(3)
            process = await run("--listen", f"{HOST}:{port}", "--bootstrap", f"{HOST}:{broker.port}")
            await broker.answer_kproxy()
            await said(process, "ready cluster=default")
            client = await Wire.dial(port)
            await broker.accept()
            process.send_signal(signal.SIGTERM)
            assert ": 1 connections drained, 0 closed" in await said(process, "stopped in")
            client.close()
            while process.returncode is None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.0005)
            assert process.returncode == 0

    live(test())


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_the_recording_is_written_at_the_end(end, tmp_path):
    async def test():
        broker = Broker()
        port = free_ports(3)
        process = await run("--listen", f"{HOST}:{port}", "--bootstrap", f"{HOST}:{broker.port}", "--record", tmp_path)
        await broker.answer_kproxy()
        await said(process, "ready cluster=default")
        client = await Wire.dial(port)
        await client.send(request(12, 4, 1))
        wire = await broker.accept()
        await wire.frame()
        await wire.send(response(12, 4, 1))
        await client.frame()
        await client.send(request(12, 4, 2))
        await wire.frame()
        process.send_signal(end)
        await said(process, f"{end.name}: draining")
        wire.close()
        assert "recorded 2 exchanges" in await said(process, "recorded")
        assert await process.wait() == 0
        client.close()
        rows = pyarrow.parquet.read_table(tmp_path / "exchanges").to_pylist()
        assert [(row["api"], row["correlation_id"], row["outcome"]) for row in rows] == [
            ("Heartbeat", 1, "answered"),
            ("Heartbeat", 2, "unanswered"),
        ]
        (connection,) = pyarrow.parquet.read_table(tmp_path / "connections").to_pylist()
        assert (connection["requests"], connection["answers"]) == (2, 1)

    live(test())


def test_kproxy_does_not_start_if_it_cannot_record(tmp_path):
    async def test():
        (tmp_path / "file").touch()
        addresses = ("--listen", f"{HOST}:{free_ports(3)}", "--bootstrap", f"{HOST}:9092")
        process = await run(*addresses, "--record", tmp_path / "file")
        _, stderr = await process.communicate()
        assert process.returncode == 2
        why = "cannot be written to: it is a file, no folder"
        assert stderr.decode().endswith(f"kproxy: record: {tmp_path}/file: {why}\n")
        without = "import sys; sys.modules['pyarrow'] = None; from kproxy.cli import main; main()"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", without, "run", *addresses, "--record", tmp_path), stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await process.communicate()
        assert process.returncode == 2
        fix = install_command("offline")
        assert f"needs pyarrow, which is not installed: {fix}" in stderr.decode()

    live(test())


def test_a_start_and_a_reload_log_what_check_warns_of_each_once(tmp_path, caplog):
    texts = [
        "shop: policy[0]: allows everything to everybody, and no rule denies",
        "shop: policy_default: no rule denies, and what none matches is allowed: the policy refuses nothing",
    ]

    def settings(bootstrap, rule, interval_s):
        file = tmp_path / "kproxy.toml"
        file.write_text(
            f"discovery_interval_s = {interval_s}\n[[cluster]]\nname = 'shop'\nlisten = '{HOST}:{port}'\n"
            f"bootstrap = '{HOST}:{bootstrap}'\npolicy_default = 'allow'\n[[cluster.policy]]\naction = 'allow'\n{rule}"
        )
        return load(file)

    def lines():
        return [line for line in caplog.messages if line.startswith("shop: ")]

    async def test():
        broker = Broker()
        server = Server(settings(broker.port, "", 30))
        await server.start()
        while not lines():  # noqa: ASYNC110 - of a thread beside
            await asyncio.sleep(0.005)
        for rule in ("", "topic = 'orders'\n"):
            server.reloader.reads(partial(settings, broker.port, rule, 20))
            assert (await server.reloader.reload("the test")).outcome == "applied"
        while len(lines()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await server.stop()
        broker.close()
        assert [line.partition(": restrict")[0].partition(": leave")[0] for line in lines()] == texts

    port = free_ports(3)
    live(test())
