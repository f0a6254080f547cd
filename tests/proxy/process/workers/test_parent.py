"""`kproxy run --workers` as real processes, some of which are killed."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

import pyarrow.parquet
import pytest

from kproxy.errors import ConfigError
from kproxy.protocol import codec
from kproxy.protocol.apis import FETCH, HEARTBEAT, LIST_OFFSETS, METADATA
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.load import load
from kproxy.proxy.config.settings import Config
from kproxy.proxy.process.changing.changes import Upstream, changes
from kproxy.proxy.process.embedded import Proxy
from kproxy.proxy.process.server import Server
from kproxy.proxy.process.workers.crew import LATE_S, Member
from kproxy.proxy.process.workers.parent import Parent
from kproxy.proxy.process.workers.template import Template
from kproxy.proxy.process.workers.worker_process import Beginning, Serving
from kproxy.proxy.sockets.channel import Channel
from tests.certificates import Authority
from tests.ports import free_ports
from tests.proxy.live import HOST, Broker, Wire, live, request, response

KPROXY = Path(sys.executable).with_name("kproxy")
PATIENCE_S = 120  # each test starts several processes, perhaps on a busy machine
GAUGES = re.compile(r"kproxy_(open_connections|inflight|ready|accepting|workers|consumer|client_info|worker_resident)")


class Run:
    """A kproxy process with its log and its admin port."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, broker: Broker) -> None:
        self.process = process
        self.port = port
        self.admin = port + 1
        self.broker = broker
        self.lines: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode())

    async def logged(self, text: str) -> str:
        while not (found := [line for line in self.lines if text in line]):
            assert self.process.returncode is None or not self._reading.done(), self.lines
            await asyncio.sleep(0.01)
        return found[0]

    async def get(self, path: str) -> str:
        def fetch() -> str:
            with urllib.request.urlopen(f"http://{HOST}:{self.admin}{path}", timeout=PATIENCE_S) as answer:
                return answer.read().decode()

        return await asyncio.to_thread(fetch)

    async def scrape(self) -> dict[str, float]:
        samples = (line.rsplit(" ", 1) for line in (await self.get("/metrics")).splitlines() if line[0] != "#")
        return {series: float(value) for series, value in samples}

    async def rows(self) -> list[dict[str, object]]:
        return json.loads(await self.get("/api/connections"))

    @property
    def template(self) -> int:
        (pid,) = children(self.process.pid)
        return pid

    @property
    def workers(self) -> list[int]:
        return children(self.template)

    async def connect(self) -> tuple[Wire, Wire]:
        client = await Wire.dial(self.port)
        return client, await self.broker.accept()

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        while not await condition():  # noqa: ASYNC110 - other processes change it
            await asyncio.sleep(0.02)


def in_proc(pid: int, name: str) -> Path:
    return Path(f"/proc/{pid}") / name


def runs(pid: int) -> bool:
    try:
        return in_proc(pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    threads = in_proc(pid, "task").glob("*/children")  # the kernel lists children by thread
    return [int(child) for thread in threads for child in thread.read_text().split()]


def total(samples: dict[str, float], name: str, **labels: str) -> float:
    asked = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for series, value in samples.items()
        if series.partition("{")[0] == name and all(a in series for a in asked)
    )


@asynccontextmanager
async def kproxy(
    *arguments: str, workers: int = 2, broker: Broker | None = None, files: int | None = None
) -> AsyncIterator[Run]:
    """`files`: the limit of open files for each process."""
    broker = broker or Broker()
    port = free_ports(8)
    process = await asyncio.create_subprocess_exec(
        *(KPROXY, "run", "--listen", f"{HOST}:{port}", "--bootstrap", f"{HOST}:{broker.port}"),
        *("--admin", f"{HOST}:{port + 1}", "--broker-port-base", str(port + 2), "--workers", str(workers), *arguments),
        *("--discovery-interval-s", "600"),
        env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )
    run = Run(process, port, broker)
    try:
        await broker.answer_kproxy()
        await run.logged("ready cluster=default")
        yield run
    except BaseException:
        print("".join(run.lines))
        raise
    finally:
        left = [process.pid] if process.returncode is None else []
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # its workers end with it
        await process.wait()
        broker.close()


def patient_for(monkeypatch: pytest.MonkeyPatch, folder: Path, times: str) -> None:
    """Change how long kproxy waits for its workers: `times` is a statement that sets constants of the module `crew`."""
    (folder / "sitecustomize.py").write_text(f"import kproxy.proxy.process.workers.crew as crew\n{times}\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)


async def ask(client: Wire, broker: Wire, number: int = 1) -> bytes:
    """One exchange."""
    await client.send(request(HEARTBEAT, 4, number))
    await broker.frame()
    await broker.send(response(HEARTBEAT, 4, number))
    return await client.frame()


async def alive(client: Wire, broker: Wire) -> bool:
    try:
        async with asyncio.timeout(60):
            return await ask(client, broker, 7) == response(HEARTBEAT, 4, 7)
    except OSError:
        return False


async def is_closed(client: Wire) -> bool:
    try:
        async with asyncio.timeout(60):
            return await client.rest() == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_killed_worker_loses_only_its_own_connections_and_no_counts():
    async def test():
        async with kproxy() as here:
            pairs = [await here.connect() for _ in range(8)]
            for client, broker in pairs:
                for number in range(5):
                    await ask(client, broker, number)
            rows = await here.rows()
            assert sorted(Counter(row["worker"] for row in rows).values()) == [4, 4]
            before = await here.scrape()
            assert total(before, "kproxy_requests_total") == 40  # exact at any time: a scrape queries the workers
            assert total(before, "kproxy_open_connections") == 8
            victim = here.workers[0]
            os.kill(victim, signal.SIGKILL)
            assert "was killed by SIGKILL" in await here.logged(f"(pid {victim})")
            mine = {int(str(row["client"]).rpartition(":")[2]) for row in rows if row["worker"] == 1}
            for client, broker in pairs:
                if client.sock.getsockname()[1] in mine:
                    assert await is_closed(client)
                else:
                    assert await alive(client, broker)
            after = await here.scrape()
            for series, value in before.items():
                if series.startswith("kproxy_") and not GAUGES.match(series):
                    assert after[series] >= value, series
            assert total(after, "kproxy_requests_total") == 44
            assert total(after, "kproxy_open_connections") == 4
            assert total(after, "kproxy_disconnects_total", cause="worker_lost") == 4
            assert total(after, "kproxy_worker_restarts_total") == 1

            async def replaced() -> bool:
                return total(await here.scrape(), "kproxy_workers") == 2

            await here.until(replaced)
            more = [await here.connect() for _ in range(4)]  # all go to the new worker, which has no connections
            for client, broker in more:
                assert await alive(client, broker)
            rows = await here.rows()
            assert sorted(Counter(row["worker"] for row in rows).values()) == [4, 4]
            assert len({row["number"] for row in rows}) == 8
            end = await here.scrape()
            assert total(end, "kproxy_requests_total") == 48
            assert total(end, "kproxy_connections_total") == 12

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_twenty_killed_workers_leak_no_files_and_no_memory():
    async def test():
        async with kproxy() as here:
            files, memory = [], []
            counted = 0.0
            for number in range(20):
                client, broker = await here.connect()
                assert await alive(client, broker)
                await here.scrape()
                os.kill(here.workers[number % 2], signal.SIGKILL)
                client.close()
                broker.close()

                async def replaced() -> bool:
                    nonlocal counted
                    samples = await here.scrape()
                    assert total(samples, "kproxy_requests_total") >= counted
                    counted = total(samples, "kproxy_requests_total")
                    return total(samples, "kproxy_workers") == 2 and len(here.workers) == 2

                await here.until(replaced)
                files.append(len(list(in_proc(here.process.pid, "fd").iterdir())))
                memory.append(int(in_proc(here.process.pid, "statm").read_text().split()[1]))
            assert max(files[5:]) <= max(files[:5]) + 1
            assert memory[-1] - memory[4] < 1024  # pages: 4 MiB
            assert counted == 20
            assert total(await here.scrape(), "kproxy_worker_restarts_total") == 20

    live(test(), PATIENCE_S)


def test_a_signal_to_all_processes_starts_one_drain():
    """Ctrl-C reaches every process of a terminal, systemd's SIGTERM every process of the service."""

    async def test():
        async with kproxy() as here:
            pairs = [await here.connect() for _ in range(4)]
            for client, broker in pairs:
                await client.send(request(HEARTBEAT, 4, 1))
                await broker.frame()
            os.killpg(here.process.pid, signal.SIGTERM)
            await here.logged("SIGTERM: draining")
            await asyncio.sleep(0.2)
            for client, broker in pairs:
                await broker.send(response(HEARTBEAT, 4, 1))
                assert await client.frame() == response(HEARTBEAT, 4, 1)
                assert await client.rest() == b""
                client.close()
            assert await here.process.wait() == 0
            assert "4 connections drained, 0 closed" in here.lines[-1]

    live(test(), PATIENCE_S)


def test_a_second_signal_ends_the_drain_of_all_workers():
    async def test():
        async with kproxy("--drain-timeout-s", "60") as here:
            pairs = [await here.connect() for _ in range(2)]
            for client, broker in pairs:
                await client.send(request(HEARTBEAT, 4, 1))
                await broker.frame()
            here.process.send_signal(signal.SIGTERM)
            await here.logged("SIGTERM: draining")
            here.process.send_signal(signal.SIGTERM)
            assert await here.process.wait() == 0
            assert "2 closed before their requests were answered" in here.lines[-1]

    live(test(), PATIENCE_S)


def test_workers_end_with_their_parent():
    async def test():
        async with kproxy("--drain-timeout-s", "1") as here:
            client, broker = await here.connect()
            processes = [here.template, *here.workers]
            os.kill(here.process.pid, signal.SIGKILL)
            assert await is_closed(client)  # drained: it had no request in flight
            broker.close()

            async def ended() -> bool:
                return not any(in_proc(pid, "").exists() for pid in processes)

            await here.until(ended)

    live(test(), PATIENCE_S)


def test_a_killed_template_is_replaced_and_workers_continue():
    """Killed as by the OOM killer: alone, while it is needed, and repeatedly."""

    async def test():
        async with kproxy("--drain-timeout-s", "5") as here:
            pairs = [await here.connect() for _ in range(4)]
            first, orphans = here.template, here.workers
            os.kill(first, signal.SIGKILL)
            await here.logged("another one is started, workers go on")
            for client, broker in pairs:
                assert await alive(client, broker)
            os.kill(orphans[0], signal.SIGKILL)
            await here.logged(f"(pid {orphans[0]})")

            async def has(count: int) -> bool:
                return total(await here.scrape(), "kproxy_workers") == count

            await here.until(lambda: has(2))
            assert sum([await alive(client, broker) for client, broker in pairs[1::2]]) == 2
            second = here.template
            assert second != first
            (fresh,) = here.workers
            for pid in (second, fresh):  # while there is no template that could fork it
                os.kill(pid, signal.SIGKILL)
            await here.logged(f"(pid {fresh})")
            await here.until(lambda: has(2))
            for _ in range(4):
                assert await alive(*await here.connect())
            assert await here.get("/ready") == "ready\n"
            here.process.send_signal(signal.SIGTERM)
            assert await here.process.wait() == 0
            assert not runs(orphans[1])

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_kproxy_exits_if_templates_keep_ending(tmp_path):
    """The service manager then restarts kproxy, with the version that is installed by then."""

    async def test():
        async with kproxy("--drain-timeout-s", "1") as here:
            while here.process.returncode is None:
                for pid in children(here.process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with suppress(TimeoutError):
                    await asyncio.wait_for(here.process.wait(), 0.02)
            assert here.process.returncode == 2
            assert any("has ended again: kproxy drains and ends" in line for line in here.lines)

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_kproxy_exits_with_a_message_if_no_descriptor_is_left_for_a_template():
    async def test():
        async with kproxy("--drain-timeout-s", "1") as here:
            used = {int(file.name) for file in in_proc(here.process.pid, "fd").iterdir()}
            first_free = next(number for number in range(len(used) + 1) if number not in used)
            _, hard = resource.prlimit(here.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(here.process.pid, resource.RLIMIT_NOFILE, (first_free, hard))
            os.kill(here.template, signal.SIGKILL)
            assert await here.process.wait() == 2
            await here.logged("no worker can be started any more")
            assert "Traceback" not in "".join(here.lines)

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_a_worker_forked_during_the_drain_does_not_delay_the_exit(monkeypatch, tmp_path):
    """The other workers have received `drain` by then; this one would never receive it."""
    patient_for(monkeypatch, tmp_path, "crew._STATUS_S = 0.1")

    async def test():
        async with kproxy("--drain-timeout-s", "20") as here:
            client, broker = await here.connect()
            await client.send(request(HEARTBEAT, 0, 1))
            await broker.frame()
            (row,) = await here.rows()
            idle = here.workers[2 - int(str(row["worker"]))]
            template = here.template
            os.kill(template, signal.SIGSTOP)  # it forks after the signal
            os.kill(idle, signal.SIGKILL)
            await here.logged("another one starts")
            here.process.send_signal(signal.SIGTERM)
            await here.logged("SIGTERM: draining")
            await asyncio.sleep(0.2)
            os.kill(template, signal.SIGCONT)
            await asyncio.sleep(1)
            answer = response(HEARTBEAT, 0, 1)
            await broker.send(answer)
            assert await client.frame() == answer
            assert await here.process.wait() == 0
            assert not [line for line in here.lines if "does not end" in line or "parent process is gone" in line]

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_a_stopped_worker_gets_no_further_clients(monkeypatch, tmp_path):
    """The clients that it already has wait; other workers serve the later ones."""
    patient_for(monkeypatch, tmp_path, "crew.LATE_S = 0.1")

    async def test():
        async with kproxy() as here:
            os.kill(here.workers[0], signal.SIGSTOP)
            waiting = [await Wire.dial(here.port) for _ in range(2)]  # one of them goes to the stopped worker
            await here.broker.accept()
            await asyncio.sleep(0.7)  # much more than LATE_S
            pairs = [await here.connect() for _ in range(6)]
            for client, broker in pairs:
                assert await alive(client, broker)
            assert total(await here.scrape(), "kproxy_open_connections") == 7
            os.kill(here.workers[0], signal.SIGCONT)
            await here.broker.accept()
            for wire in waiting:
                wire.close()

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_each_worker_takes_as_many_connections_as_its_descriptors_allow():
    """Two workers serve twice as many clients as one process can; the parent keeps no sockets of clients."""

    async def test():
        async with kproxy(files=200) as run:
            line = await run.logged("at most")
            most = int(re.search(r"at most (\d+) connections", line)[1])
            assert most == 2 * 50
            pairs = [await run.connect() for _ in range(most)]
            for at, (client, broker) in enumerate(pairs):
                await client.send(request(HEARTBEAT, 0, at))
                assert await broker.frame() == request(HEARTBEAT, 0, at)
            assert Counter(row["worker"] for row in await run.rows()) == {1: most // 2, 2: most // 2}
            assert not [line for line in run.lines if "cannot open" in line]
            waits = await Wire.dial(run.port)  # it waits in the backlog
            for side in pairs.pop():
                side.close()
            broker = await run.broker.accept()
            await waits.send(request(HEARTBEAT, 0, 1))
            assert await broker.frame() == request(HEARTBEAT, 0, 1)

    live(test())


def test_a_hung_worker_is_killed_and_replaced(monkeypatch, tmp_path):
    """The parent checks periodically that each worker's loop runs. A worker that is only slow to answer survives."""
    patient_for(monkeypatch, tmp_path, "crew.BEAT_S, crew.HANGS_S = 0.1, 3.0")

    async def test():
        async with kproxy() as here:
            slow, hung = here.workers
            os.kill(slow, signal.SIGSTOP)
            await asyncio.sleep(0.5)
            os.kill(here.process.pid, signal.SIGSTOP)  # the parent has asked; the worker hangs beyond HANGS_S
            os.kill(slow, signal.SIGCONT)
            await asyncio.sleep(4)
            os.kill(here.process.pid, signal.SIGCONT)
            os.kill(hung, signal.SIGSTOP)
            await here.logged(f"(pid {hung}) hangs: no answer for 3 s")
            await here.logged(f"(pid {hung}) was killed by SIGKILL")

            async def replaced() -> bool:
                samples = await here.scrape()
                return samples["kproxy_workers"] == 2 and samples["kproxy_worker_restarts_total"] == 1

            await here.until(replaced)
            assert slow in here.workers and hung not in here.workers
            pairs = [await here.connect() for _ in range(4)]
            for client, broker in pairs:
                assert await alive(client, broker)

    live(test(), PATIENCE_S)


def test_the_port_of_a_broker_is_bound_before_its_address_reaches_a_client():
    """Two workers discover the same brokers at the same moment; each client dials them as soon as it can."""

    async def test():
        async with kproxy() as here:
            pairs = [await here.connect() for _ in range(8)]
            for first in range(2, 5):
                nodes = [{"nodeId": first, "host": HOST, "port": here.broker.port}]
                for client, broker in pairs:
                    await client.send(request(METADATA, 12, first))
                    await broker.frame()

                async def dials(client: Wire, node_id: int = first) -> None:
                    await client.frame()
                    with socket.create_connection((HOST, here.port + 2 + node_id)):  # refused: not bound yet
                        pass

                asked = [asyncio.create_task(dials(client)) for client, _ in pairs]
                answer = response(METADATA, 12, first, {"brokers": nodes})
                await asyncio.gather(*(broker.send(answer) for _, broker in pairs))
                await asyncio.gather(*asked)
            samples = await here.scrape()
            assert total(samples, "kproxy_unbound_brokers_total") == 0
            assert total(samples, "kproxy_rewritten_addresses_total", api="Metadata") == 24
            clusters = json.loads(await here.get("/api/clusters"))
            assert set(clusters[0]["brokers"]) == {"1", "2", "3", "4"}

    live(test(), PATIENCE_S)


def test_clients_of_every_worker_reach_a_broker_that_one_worker_discovered():
    """Its clients dial it as soon as they have the response, and are assigned to the other worker."""

    async def test():
        async with kproxy() as here:
            (client, broker), _ = [await here.connect() for _ in range(2)]
            serving: set[asyncio.Task[None]] = set()

            async def answer(wire: Wire) -> None:
                await wire.frame()
                await wire.send(response(HEARTBEAT, 4, 1))

            async def serve() -> None:
                while True:
                    serving.add(asyncio.create_task(answer(await here.broker.accept())))

            serving.add(asyncio.create_task(serve()))
            for node_id in range(2, 6):
                await client.send(request(METADATA, 12, node_id))
                await broker.frame()
                nodes = [{"nodeId": node_id, "host": HOST, "port": here.broker.port}]
                await broker.send(response(METADATA, 12, node_id, {"brokers": nodes}))
                await client.frame()
                wires = [await Wire.dial(here.port + 2 + node_id) for _ in range(4)]
                for wire in wires:
                    await wire.send(request(HEARTBEAT, 4, 1))
                assert [await wire.frame() for wire in wires] == [response(HEARTBEAT, 4, 1)] * 4
            for task in serving:
                task.cancel()

    live(test(), PATIENCE_S)


def test_all_workers_learn_the_new_address_of_a_broker():
    async def test():
        async with kproxy() as here:
            moved = Broker()
            (client, broker), _ = [await here.connect() for _ in range(2)]
            await client.send(request(METADATA, 12, 1))
            await broker.frame()
            await broker.send(response(METADATA, 12, 1, {"brokers": [{"nodeId": 1, "host": HOST, "port": moved.port}]}))
            await client.frame()

            async def is_known() -> bool:
                return str(moved.port) in await here.get("/api/clusters")

            await here.until(is_known)
            for _ in range(4):  # both workers get some of them
                wire = await Wire.dial(here.port + 3)
                assert await alive(wire, await moved.accept())

    live(test(), PATIENCE_S)


def test_several_workers_count_the_same_as_one_process():
    """The same traffic through one process and through three workers: all counters except times are equal."""

    def counters(samples: dict[str, float]) -> dict[str, float]:
        exact = re.compile(
            r"kproxy_(requests|request_bytes|response_bytes|connections|errors|topic_\w+|client_info|rewritten_addresses"
            r"|response_size_bytes|request_size_bytes|unanswered_requests|disconnects|protocol_faults)"
            r"(_total|_bucket|_count|\{)"
        )
        return {series: value for series, value in samples.items() if exact.match(series)}

    async def counted(workers: int) -> dict[str, float]:
        async with kproxy("--detail", "topics", workers=workers) as here:
            pairs = [await here.connect() for _ in range(6)]
            for at, (client, broker) in enumerate(pairs):
                for number in range(at + 1):
                    await ask(client, broker, number)
            client, broker = pairs[0]
            await client.send(request(METADATA, 12, 1))
            await broker.frame()
            await broker.send(response(METADATA, 12, 1, {"brokers": here.broker.brokers()}))
            await client.frame()
            client, broker = pairs[1]
            await client.send(request(HEARTBEAT, 4, 1))
            await broker.frame()
            await broker.send(response(HEARTBEAT, 4, 1, {"errorCode": 27}))
            await client.frame()
            client, broker = pairs[2]
            await client.send(request(HEARTBEAT, 4, 1))
            await broker.frame()
            broker.close()
            await client.rest()
            client.close()
            for client, broker in pairs[3:]:
                client.close()
                await broker.rest()  # the side that ends first is counted
                broker.close()

            async def closed() -> bool:
                return total(await here.scrape(), "kproxy_open_connections") <= 2

            await here.until(closed)
            return {re.sub(r"\d{5}", "PORT", series): value for series, value in counters(await here.scrape()).items()}

    async def test():
        alone, three = await counted(1), await counted(3)
        assert len(alone) > 100
        assert three == alone

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_workers_learn_that_a_log_was_truncated():
    """One worker sees the truncation; without it, the other would wait until the log exceeds its former end."""

    async def fetch(client: Wire, broker: Wire, end: int, epoch: int) -> None:
        wanted = {"partition": 0, "fetchOffset": 0, "currentLeaderEpoch": epoch}
        asked = {"replicaId": -1, "rackId": "", "topics": [{"topic": "t", "partitions": [wanted]}]}
        partition = {"partitionIndex": 0, "errorCode": 0, "highWatermark": end, "records": None}
        await client.send(request(FETCH, 11, 1, asked))
        await broker.frame()
        await broker.send(response(FETCH, 11, 1, {"responses": [{"topic": "t", "partitions": [partition]}]}))
        await client.frame()

    async def test():
        async with kproxy("--detail", "topics") as here:

            async def ends_at(offset: int) -> bool:
                return total(await here.scrape(), "kproxy_log_end_offset", topic="t") == offset

            async def have_one_each() -> bool:
                return {row["worker"] for row in await here.rows()} == {1, 2}

            one, other = [await here.connect() for _ in range(2)]
            await here.until(have_one_each)
            for pair in (one, other):
                await fetch(*pair, end=100, epoch=5)
            await here.until(partial(ends_at, 100))
            await fetch(*one, end=40, epoch=6)
            await here.until(partial(ends_at, 40))

            async def is_learned() -> bool:
                await fetch(*other, end=50, epoch=5)
                return await ends_at(50)

            await here.until(is_learned)

    live(test(), PATIENCE_S)


def test_the_cause_of_a_failed_start_of_a_worker_is_one_line_without_a_traceback(tmp_path):
    """A folder that cannot be used, found before workers start; and a cause that only workers find."""

    async def test():
        (tmp_path / "file").touch()
        broker = Broker()
        without = tmp_path / "without"  # a missing extra
        (without / "numpy").mkdir(parents=True)
        (without / "numpy/__init__.py").write_text("raise ModuleNotFoundError('no numpy', name='numpy')")
        for dumps, first, words in (
            (tmp_path / "file", tmp_path, "file cannot be used: it is a file, no folder"),
            (tmp_path / "dumps", without, "cannot start: flight: needs numpy"),
        ):
            port = free_ports(2)
            process = await asyncio.create_subprocess_exec(
                *(KPROXY, "run", "--listen", f"{HOST}:{port}", "--bootstrap", f"{HOST}:{broker.port}"),
                *("--workers", "2", "--flight", str(dumps)),
                env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{first}:{os.environ.get('PYTHONPATH', '')}"},
                stderr=asyncio.subprocess.PIPE,
            )
            text = (await process.communicate())[1].decode()
            assert process.returncode == 2 and "Traceback" not in text and words in text, text
        broker.close()

    live(test(), PATIENCE_S)


def test_a_port_in_use_is_reported_and_no_process_remains():
    async def test():
        with socket.socket() as taken:
            taken.bind((HOST, 0))
            taken.listen()
            process = await asyncio.create_subprocess_exec(
                *(KPROXY, "run", "--listen", f"{HOST}:{taken.getsockname()[1]}", "--bootstrap", f"{HOST}:1"),
                *("--workers", "2"),
                stderr=asyncio.subprocess.PIPE,
            )
            _, stderr = await process.communicate()  # returns when the last process has ended
            assert process.returncode == 2
            assert "another program listens there" in stderr.decode()

    live(test(), PATIENCE_S)


def written(folder: Path, port: int, broker: Broker, more: str = "") -> Path:
    file = folder / "kproxy.toml"
    file.write_text(
        f'workers = 2\nadmin = "{HOST}:{port + 1}"\ndiscovery_interval_s = 600\ndrain_timeout_s = 2\n[[cluster]]\n'
        f'listen = "{HOST}:{port}"\nbroker_port_base = {port + 2}\nbootstrap = ["{HOST}:{broker.port}"]\n{more}'
    )
    return file


@asynccontextmanager
async def from_file(file: Path, port: int, broker: Broker) -> AsyncIterator[Run]:
    process = await asyncio.create_subprocess_exec(
        *(KPROXY, "run", "--config", str(file)),
        env={name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        stderr=asyncio.subprocess.PIPE,
    )
    run = Run(process, port, broker)
    try:
        await broker.answer_kproxy()
        await run.logged("ready cluster=default")
        yield run
    except BaseException:
        print("".join(run.lines))
        raise
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        broker.close()


def test_a_reload_applies_new_settings_in_the_workers(tmp_path):
    """A reload changes a limit that workers apply; open connections continue."""

    async def test():
        broker, port = Broker(), free_ports(8)
        async with from_file(written(tmp_path, port, broker), port, broker) as here:
            before = [await here.connect() for _ in range(2)]
            written(tmp_path, port, broker, "max_request_bytes = 2000\n")
            here.process.send_signal(signal.SIGHUP)
            await here.logged("reload by SIGHUP: ")
            for _ in range(2):  # one for each worker, which has the new settings by then
                client, _ = await here.connect()
                await client.send((3000).to_bytes(4, "big") + bytes(3000))
                assert await is_closed(client)
            for client, wire in before:
                assert await alive(client, wire)

            os.kill(here.workers[0], signal.SIGKILL)  # its replacement starts with the current settings
            await here.logged("another one starts")

            async def replaced() -> bool:
                return total(await here.scrape(), "kproxy_workers") == 2

            await here.until(replaced)
            client, _ = await here.connect()
            await client.send((3000).to_bytes(4, "big") + bytes(3000))
            assert await is_closed(client)

    live(test(), PATIENCE_S)


def test_limits_start_from_zero_after_a_reload_and_no_connection_is_subtracted_twice(tmp_path):
    async def test():
        broker, port = Broker(), free_ports(8)
        limits = "[cluster.limits]\nmax_connections = %d\n"
        async with from_file(written(tmp_path, port, broker, limits % 5), port, broker) as here:
            pairs = [await here.connect() for _ in range(5)]
            written(tmp_path, port, broker, limits % 3)
            here.process.send_signal(signal.SIGHUP)
            await here.logged("reload by SIGHUP: ")
            for client, wire in pairs:
                client.close()
                wire.close()

            async def ended() -> bool:
                return total(await here.scrape(), "kproxy_open_connections") == 0

            await here.until(ended)
            clients = [await Wire.dial(port) for _ in range(6)]
            assert sum([await is_closed(client) for client in clients[3:]]) == 3

    live(test(), PATIENCE_S)


def test_limits_by_address_of_proxy_headers_hold_across_all_workers(tmp_path):
    async def test():
        broker, port = Broker(), free_ports(8)
        more = f'accept_proxy_protocol = true\ntrusted_proxies = ["{HOST}/32"]\n'
        more += "[cluster.limits]\nmax_connections_per_address = 3\n"
        async with from_file(written(tmp_path, port, broker, more), port, broker) as here:

            async def connected(address: str) -> Wire:
                client = await Wire.dial(port)
                await client.send(f"PROXY TCP4 {address} 192.0.2.1 51234 9092\r\n".encode())
                return client

            async def admitted(address: str) -> tuple[Wire, Wire]:
                return await connected(address), await here.broker.accept()

            async def total_open(count: int) -> None:
                async def reached() -> bool:
                    return total(await here.scrape(), "kproxy_open_connections") == count

                await here.until(reached)

            ours = [await admitted("203.0.113.7") for _ in range(3)]
            await total_open(3)
            assert len({row["worker"] for row in await here.rows()}) == 2
            assert await is_closed(await connected("203.0.113.7"))
            other = await admitted("203.0.113.8")
            for wire in ours.pop():
                wire.close()
            await total_open(3)
            ours.append(await admitted("203.0.113.7"))
            assert await is_closed(await connected("203.0.113.7"))
            refused = total(await here.scrape(), "kproxy_limits_reached_total", limit="max_connections_per_address")
            assert refused == 2

            os.kill(here.workers[0], signal.SIGKILL)  # its clients no longer count
            await here.logged("another one starts")
            lost = [not await alive(*pair) for pair in ours]
            ours += [await admitted("203.0.113.7") for _ in range(sum(lost))]
            await total_open(3 + await alive(*other))
            assert await is_closed(await connected("203.0.113.7"))
            assert 0 < sum(lost) < 3, (lost, other)

    live(test(), PATIENCE_S)


class ParentWithoutWorkers(Parent):
    """A parent without processes: each test plays the workers."""

    def __init__(self) -> None:
        super().__init__(2, cast(Template, NoTemplate()))

    async def start(self) -> None:
        """Start no workers."""


class NoTemplate:
    async def close(self) -> None:
        """There is no template to close."""


def test_a_worker_survives_two_immediate_reloads():
    """Workers receive the ports of a reload 5 ms after it: if the second reload came sooner, each worker ended."""

    def settings(most: int) -> Config:
        cluster = {"name": "one", "listen": f"{HOST}:{port}", "bootstrap": [f"{HOST}:19092"], "max_request_bytes": most}
        return load(given={"workers": 2, "drain_timeout_s": 0.1, "cluster": [cluster]})

    async def test():
        parent, ours, theirs = ParentWithoutWorkers(), *socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = Server(settings(2000), team=parent)
        channel = Channel(ours, {}, lambda: None)
        serving = Serving(Beginning(server.config, 1, "token", 100, 0, 0), channel)
        takes = {"known": serving.take, "reconfigure": serving.reconfigure, "drain": lambda: None}
        parent._crew.broadcast = lambda name, *values, but=None: takes[name](*values)  # type: ignore[method-assign]
        serving.start()
        await server.start()
        try:
            parent._push_now()
            for most in (3000, 4000):
                new = settings(most)
                await server.reconfigure(new, changes(server.config, new))
                (proxy,) = serving._relays.clusters
                assert proxy.cluster.max_request_bytes == most
                assert proxy.routes.advertised(1, HOST).port == port + 2
        finally:
            await server.stop()
            await serving._relays.close()
            channel.close()
            theirs.close()

    port = free_ports(4)
    live(test(), PATIENCE_S)


def test_brokers_of_the_former_cluster_are_not_added_to_the_next_one():
    """A worker's message was in flight while a reload changed the bootstrap: clients reached the former brokers."""

    async def test():
        former, latter = Address(HOST, 19092), Address(HOST, 29092)  # no listener there
        port = free_ports(4)

        def settings(*bootstrap: Address) -> Config:
            flags = {"listen": f"{HOST}:{port}", "bootstrap": ",".join(map(str, bootstrap))}
            return load(flags={**flags, "workers": 2, "drain_timeout_s": 0.1})

        parent = ParentWithoutWorkers()
        server = Server(settings(former), team=parent)
        await server.start()
        try:
            handlers = parent._handlers(Member(1))

            def bind(*arguments: object) -> bool:
                is_open, given = handlers["bind"](*arguments)
                assert given is None
                return is_open

            route = server.config.clusters[0].route
            assert bind("default", Upstream(route, (former,)), 1, HOST, 19093)
            assert server.clusters[0].routes.upstreams == {1: Address(HOST, 19093)}
            for new in (settings(latter, former), settings(latter)):
                await server.reconfigure(new, changes(server.config, new))
            assert not bind("default", Upstream(route, (former,)), 9, HOST, 19094)
            assert bind("default", Upstream(route, (former,)), 1, HOST, 19095)  # its port is open
            assert server.clusters[0].routes.upstreams == {1: Address(HOST, 19093)}  # they share a broker
            assert bind("default", Upstream(route, (latter,)), 1, HOST, 29093)
            assert server.clusters[0].routes.upstreams == {1: Address(HOST, 29093)}
            assert not bind("removed", Upstream(route, (former,)), 1, HOST, 19093)
        finally:
            await server.stop()

    live(test(), PATIENCE_S)


def test_the_series_of_a_cluster_end_with_its_removal(tmp_path):
    """Series of live workers, and of one that has died."""

    async def test():
        broker, other, port = Broker(), Broker(), free_ports(20)
        second = f'name = "default"\n[[cluster]]\nname = "two"\nlisten = "{HOST}:{port + 10}"\n'
        second += f'bootstrap = ["{HOST}:{other.port}"]\n'
        async with from_file(written(tmp_path, port, broker, second), port, broker) as here:

            async def series() -> int:
                return (await here.get("/metrics")).count('cluster="two"')

            await other.answer_kproxy()
            for _ in range(2):
                client = await Wire.dial(port + 10)
                assert await alive(client, await other.accept())
            victim = here.workers[0]
            os.kill(victim, signal.SIGKILL)
            await here.logged(f"(pid {victim})")
            assert await series()
            written(tmp_path, port, broker, 'name = "default"\n')
            here.process.send_signal(signal.SIGHUP)
            await here.logged("cluster two removed")

            async def ended() -> bool:
                return not await series()

            await here.until(ended)

    live(test(), PATIENCE_S)


def test_counters_of_a_removed_cluster_do_not_fall_while_a_worker_drains_it(tmp_path):
    """The parent counts clients that exceed a limit when it accepts them; it has no connections to drain."""

    async def test():
        broker, other, port = Broker(), Broker(), free_ports(20)
        second = f'name = "default"\n[[cluster]]\nname = "two"\nlisten = "{HOST}:{port + 10}"\n'
        second += f'bootstrap = ["{HOST}:{other.port}"]\nlimits = {{ max_connections_per_address = 1 }}\n'

        def write(more: str) -> Path:
            file = written(tmp_path, port, broker, more)
            file.write_text(file.read_text().replace("drain_timeout_s = 2", "drain_timeout_s = 600"))
            return file

        async with from_file(write(second), port, broker) as here:
            await other.answer_kproxy()
            client = await Wire.dial(port + 10)
            wire = await other.accept()
            asked = request(HEARTBEAT, 4, 7)
            await client.send(asked)
            assert await wire.frame() == asked
            assert await is_closed(await Wire.dial(port + 10))

            async def kept_out() -> float:
                return total(await here.scrape(), "kproxy_disconnects_total", cluster="two", cause="limit")

            assert await kept_out() == 1
            write('name = "default"\n')
            here.process.send_signal(signal.SIGHUP)
            await here.logged(" kproxy.server cluster=two: 0 connections drained")
            assert await kept_out() == 1
            await wire.send(response(HEARTBEAT, 4, 7))

            async def ended() -> bool:
                return 'cluster="two"' not in await here.get("/metrics")

            await here.until(ended)

    live(test(), PATIENCE_S)


def test_every_worker_applies_the_policy_until_a_reload_removes_it(tmp_path):
    """Refusals of all workers are added up; the reload drains connections, since their rights have changed."""

    def offsets(topic: str, number: int) -> bytes:
        topics = [{"name": topic, "partitions": [{"partitionIndex": 0}]}]
        return request(LIST_OFFSETS, 5, number, {"replicaId": -1, "topics": topics})

    async def test():
        broker, port = Broker(), free_ports(8)
        rule = '[[cluster.policy]]\naction = "deny"\ntopic = "secret-*"\n'
        async with from_file(written(tmp_path, port, broker, rule), port, broker) as here:
            pairs = [await here.connect() for _ in range(6)]  # three for each worker
            for number, (client, end) in enumerate(pairs):
                await client.send(offsets("secret-1", number) + offsets("orders", number))
                (topic,) = codec.decode_response((await client.frame())[4:], LIST_OFFSETS, 5)[1]["topics"]
                assert topic["partitions"][0]["errorCode"] == 29  # TOPIC_AUTHORIZATION_FAILED
                assert await end.frame() == offsets("orders", number)
                await end.send(response(LIST_OFFSETS, 5, number))
                await client.frame()
            samples = await here.scrape()
            assert total(samples, "kproxy_policy_refusals_total", api="ListOffsets", reason="rule") == 6
            written(tmp_path, port, broker)
            here.process.send_signal(signal.SIGHUP)
            await here.logged("reload by SIGHUP")
            for client, _ in pairs:
                assert await is_closed(client)
            await broker.answer_kproxy()  # kproxy requests Metadata again
            for number in range(4):
                client, end = await here.connect()
                await client.send(offsets("secret-1", number))
                assert await end.frame() == offsets("secret-1", number)

    live(test(), PATIENCE_S)


def test_a_worker_that_cannot_apply_new_settings_is_replaced(tmp_path):
    """It must not continue with old settings. Here it has no descriptor left for the files of TLS."""

    async def test():
        broker, port = Broker(), free_ports(8)
        tls = Authority(tmp_path).server().settings()
        table = "[cluster.tls]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in tls.items())
        async with from_file(written(tmp_path, port, broker), port, broker) as here:
            victim = here.workers[0]
            resource.prlimit(victim, resource.RLIMIT_NOFILE, (3, 3))
            written(tmp_path, port, broker, table)
            here.process.send_signal(signal.SIGHUP)
            await here.logged("the new settings do not work here")
            await here.logged(f"(pid {victim}) ended with status 1")
            await here.logged("another one starts")

    live(test(), PATIENCE_S)


def test_workers_without_descriptors_reject_clients_until_descriptors_are_free():
    """A worker receives the message about a client without its socket; the parent must not wait for a confirmation."""

    async def test():
        async with kproxy() as here:
            served = [await here.connect() for _ in here.workers]  # afterwards each worker has all its files open
            limits = {worker: resource.prlimit(worker, resource.RLIMIT_NOFILE) for worker in here.workers}
            for worker, (_, hard) in limits.items():
                used = {int(file.name) for file in in_proc(worker, "fd").iterdir()}
                first_free = next(number for number in range(len(used) + 1) if number not in used)
                resource.prlimit(worker, resource.RLIMIT_NOFILE, (first_free, hard))
            for _ in limits:
                turned_away = await Wire.dial(here.port)
                assert await turned_away.rest() == b""
            assert "ulimit -n" in await here.logged("no file descriptor is left")
            await asyncio.sleep(LATE_S)
            for worker, both in limits.items():
                resource.prlimit(worker, resource.RLIMIT_NOFILE, both)
            others = [await here.connect() for _ in limits]
            assert all([await alive(*each) for each in (*served, *others)])
            assert total(await here.scrape(), "kproxy_open_connections") == 4
            assert "defect" not in "".join(here.lines)

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_hung_processes_do_not_delay_the_exit_of_kproxy():
    async def test():
        async with kproxy("--drain-timeout-s", "1") as here:
            pids = [here.template, here.workers[0]]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            here.process.send_signal(signal.SIGTERM)
            assert await here.process.wait() == 0
            assert not any(runs(pid) for pid in pids)

    live(test(), PATIENCE_S)


def test_the_succeeding_kproxy_takes_over_with_its_own_workers(tmp_path):
    async def test():
        broker, port = Broker(), free_ports(8)
        async with from_file(written(tmp_path, port, broker), port, broker) as here:
            client, wire = await here.connect()
            assert await alive(client, wire)
            here.process.send_signal(signal.SIGUSR2)
            await broker.answer_kproxy()
            line = await here.logged("this kproxy follows process")
            assert line
            fresh, of_fresh = await here.connect()
            assert await alive(fresh, of_fresh)
            assert await is_closed(client)  # drained
            client.close()
            wire.close()
            here.process.send_signal(signal.SIGTERM)  # the main process of the service manager
            assert await is_closed(fresh)
            fresh.close()
            of_fresh.close()
            await here.process.wait()

            async def is_free() -> bool:  # no process of either kproxy holds the port
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        sock.bind((HOST, port))
                        sock.listen()
                    except OSError:
                        return False
                    return True

            await here.until(is_free)

    live(test(), PATIENCE_S)


def test_workers_record_into_one_folder(tmp_path):
    """A killed worker loses its buffered rows; every other exchange is recorded once."""

    async def test():
        async with kproxy("--record", str(tmp_path / "tables")) as here:
            pairs = [await here.connect() for _ in range(4)]
            for client, broker in pairs:
                assert await alive(client, broker)
            another = await asyncio.create_subprocess_exec(
                *(KPROXY, "run", "--listen", f"{HOST}:{free_ports(4)}", "--bootstrap", f"{HOST}:1"),
                *("--record", str(tmp_path / "tables")),
                stderr=asyncio.subprocess.PIPE,
            )
            _, stderr = await another.communicate()
            assert "another kproxy records into it" in stderr.decode()
            here.process.send_signal(signal.SIGTERM)
            for client, broker in pairs:
                broker.close()
                assert await is_closed(client)
                client.close()
            assert await here.process.wait() == 0
            exchanges = pyarrow.parquet.read_table(tmp_path / "tables" / "exchanges")
            assert exchanges.num_rows == 4
            assert len(list((tmp_path / "tables" / "exchanges").glob("*-worker-*.parquet"))) == 2
            assert not list((tmp_path / "tables").glob(".unfinished*"))

    live(test(), PATIENCE_S)


def test_a_loop_through_another_proxy_is_found_by_any_worker():
    """Bootstrap leads back to kproxy: each connection causes another one, until kproxy receives its own request."""

    async def test():
        async with kproxy() as here:
            made = 0

            async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                nonlocal made
                made += 1
                there, back = await asyncio.open_connection(HOST, here.port)

                async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                    try:
                        while data := await source.read(65536):
                            target.write(data)
                            await target.drain()
                    except OSError:
                        pass
                    finally:
                        target.close()

                await asyncio.gather(copy(reader, back), copy(there, writer))

            address = here.broker.sock.getsockname()
            here.broker.close()
            server = await asyncio.start_server(forward, *address)
            client = await Wire.dial(here.port)
            assert await is_closed(client)
            found = await here.logged("arrived at this kproxy's own port")
            assert "kproxy's own question" in found

            async def quiet() -> bool:
                before = made
                await asyncio.sleep(0.5)
                return made == before

            await here.until(quiet)
            assert made < 1000
            samples = await here.scrape()
            assert total(samples, "kproxy_loops_refused_total") >= 1
            assert total(samples, "kproxy_disconnects_total", cause="loop") >= 64
            server.close()

    live(test(), PATIENCE_S)


def test_an_embedded_proxy_is_one_process():
    with pytest.raises(ConfigError, match="one process"):
        Proxy(bootstrap="kafka-1:9092", workers=2)
