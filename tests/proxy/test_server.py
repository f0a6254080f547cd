"""`kproxy run` as a process: what it says, what it exits with, what its signals do."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.proxy.live import HOST, Broker, Wire, free_ports, live, request

KPROXY = Path(sys.executable).with_name("kproxy")


async def run(*arguments: str, **variables: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        KPROXY, "run", *arguments, env={"PATH": os.environ["PATH"], **variables}, stderr=asyncio.subprocess.PIPE
    )


async def said(process: asyncio.subprocess.Process, text: str) -> str:
    """The next line with that text."""
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
