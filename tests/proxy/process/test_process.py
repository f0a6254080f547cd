"""A kproxy is reloaded and upgraded under load: no client is refused, and no request stays unanswered."""

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet
import pytest

import kproxy as kproxy_package
from kproxy.metrics import Metrics
from kproxy.protocol.apis import HEARTBEAT
from kproxy.proxy.config.load import load
from kproxy.proxy.process.changing.reload import Reloader
from kproxy.proxy.process.process import Inheritance, Process
from tests.ports import free_ports
from tests.proxy.live import HOST, Wire, live, request
from tests.proxy.load import (
    KPROXY,
    PATIENCE_S,
    Brokers,
    Kproxy,
    Load,
    command_line,
    descendants,
    exists,
    kproxy_process,
    open_files,
    until,
)

TIMEOUT_S = 280  # several generations each, on a machine that may be busy


class Settings:
    """A file with two clusters of one kproxy."""

    def __init__(self, folder: Path, first: Brokers, second: Brokers) -> None:
        self.file = folder / "kproxy.toml"
        self.admin, self.one, self.two, self.spare = (free := free_ports(60)), free + 10, free + 20, free + 30
        self.process = {"admin": f"{HOST}:{self.admin}", "drain_timeout_s": 30, "discovery_interval_s": 60}
        self.clusters = [
            {"name": "one", "listen": f"{HOST}:{self.one}", "bootstrap": [first.address]},
            {"name": "two", "listen": f"{HOST}:{self.two}", "bootstrap": [second.address]},
        ]
        self.write()

    def write(self) -> None:
        """As an editor does: the new file takes the place of the old one."""
        tables = [self.process, *self.clusters]
        text = "".join(
            "[[cluster]]\n" * (number > 0) + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())
            for number, table in enumerate(tables)
        )
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.replace(self.file)


@pytest.fixture
def settings(tmp_path):
    def make(first, second):
        return Settings(tmp_path, first, second)

    return make


@pytest.mark.ring2
@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_upgrade_under_load(settings, workers):
    async def test():
        first, second = Brokers(1, 2), Brokers(1)
        config = settings(first, second)
        config.process |= {"workers": workers, "record": str(config.file.parent / "tables")}
        config.write()
        async with kproxy_process(config.file, config.admin) as kproxy:
            async with Load(config.one) as load, Load(config.one + 2) as broker_load:
                before = open_files(kproxy.pid)
                pids = {kproxy.pid}
                for generation in range(2, 7):
                    since = len(kproxy.lines)
                    kproxy.signal(signal.SIGUSR2)
                    await kproxy.says(f"generation {generation}", since)
                    await kproxy.ready()
                    await kproxy.says("stopped in", since)
                    await load.more()
                    current = int((await kproxy.says("has taken over", since)).split("process ")[-1].split()[0])
                    pids.add(current)
            load.assert_lossless()
            broker_load.assert_lossless()
            assert len(pids) == 6
            assert load.reconnects >= 5 * 4
            assert open_files(current) <= before + 4
            assert await kproxy.end() == 0
            recorded = pyarrow.parquet.read_table(config.file.parent / "tables/exchanges", columns=["number"])
            assert recorded.num_rows == load.answered + broker_load.answered
            assert not list((config.file.parent / "tables").glob(".unfinished*"))

    live(test(), TIMEOUT_S)


def stands_in(kproxy: Kproxy) -> bool:
    """Whether the process that was started passes signals on, to one that is alone."""
    return "stand_in" in command_line(kproxy.pid) and len(descendants(kproxy.pid)) == 1


def listening(lines: list[str]) -> list[str]:
    return [line for line in lines if re.search(r" INFO +\S+ listening cluster=one", line)]


@pytest.mark.ring2
@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_reload_under_load(settings, workers):
    """Each kind of change, one after the other; the other cluster's connections never notice."""

    async def test():
        first, second, third = Brokers(1, 2), Brokers(1), Brokers(1)
        config = settings(first, second)
        config.process["workers"] = workers
        config.write()
        one = config.clusters[0]
        async with kproxy_process(config.file, config.admin) as kproxy:

            async def reload(expected: str) -> None:
                since = len(kproxy.lines)
                config.write()
                kproxy.signal(signal.SIGHUP)
                line = await kproxy.says("reload by SIGHUP", since)
                assert expected in line, line
                await load.more()
                await other.more()

            async with Load(config.one) as load, Load(config.two) as other:
                await reload("the settings are those that run")
                config.process |= {"log_level": "debug", "discovery_interval_s": 50, "max_connections": 500}
                config.process |= {"accept_backlog": 512, "connect_timeout_s": 3}
                await reload("log_level")
                assert await kproxy.metric('kproxy_connection_limit{cluster="one"}') == 500
                one["detail"] = "topics"
                one["max_request_bytes"] = 100_000
                begun = len(kproxy.lines)
                await reload("cluster one: detail, max_request_bytes")
                assert not listening(kproxy.lines[begun:])  # as before: no news
                one["advertise"] = "127.0.0.1:{port}"
                await reload("cluster one: advertise")
                one["bootstrap"] = [first.address, third.address]
                await reload("cluster one: bootstrap")
                load.assert_same_connections()  # so far nothing gave a reason to end them
                files = open_files(kproxy.pid)
                one["broker_port_base"] = config.spare
                await reload("cluster one: broker_port_base")
                async with Load(config.spare + 2, clients=1) as moved:
                    await moved.more()
                assert listening(kproxy.lines[begun:])  # at other ports
                moved.assert_lossless()
                with pytest.raises(ConnectionRefusedError):
                    await Wire.dial(config.one + 2)
                config.clusters.append({"name": "three", "listen": f"{HOST}:{config.spare + 10}"})
                config.clusters[2]["bootstrap"] = [third.address]
                await reload("cluster three added")
                await kproxy.ready()
                three = Load(config.spare + 10, clients=3)
                await three.more()
                del config.clusters[2]
                await reload("cluster three removed")
                await until(lambda: three.reconnects == 3)
                assert three.unanswered == 0
                three._stopping = True
                if workers == 1:
                    await kproxy.says("cluster=three: 3 connections drained, 0 closed")
                    assert 'cluster="three"' not in (await kproxy.get("/metrics"))[1]
                load.assert_same_connections()
                one["bootstrap"] = [third.address]  # another cluster, as far as kproxy can tell
                one["bootstrap"], before = [second.address], one["bootstrap"]
                await reload("cluster one: bootstrap")
                await until(lambda: load.reconnects == 4)
                one["bootstrap"] = before
                await reload("cluster one: bootstrap")
                config.process["admin"] = f"{HOST}:{config.admin + 1}"
                await reload("admin")
                kproxy.admin += 1
                await kproxy.ready()
                assert await kproxy.metric('kproxy_config_reloads_total{outcome="applied"}') == 10
                assert await kproxy.metric('kproxy_config_reloads_total{outcome="unchanged"}') == 1
                await until(lambda: open_files(kproxy.pid) <= files + 4)
            load.assert_lossless()
            other.assert_lossless()
            other.assert_same_connections()

    live(test(), TIMEOUT_S)


def test_invalid_settings_are_reported_and_change_nothing(settings):
    async def test():
        first, second = Brokers(1), Brokers(1)
        config = settings(first, second)
        busy = socket.create_server((HOST, 0))
        taken = f"{HOST}:{busy.getsockname()[1]}"
        async with kproxy_process(config.file, config.admin) as kproxy, Load(config.one) as load:

            async def refused(*expected: str) -> None:
                config.write()
                status, body = await kproxy.get("/api/reload", post=True)
                answer = json.loads(body)
                assert (status, answer["outcome"]) == (409, "refused")
                text = "\n".join(f"{fault['place']}: {fault['text']}" for fault in answer["faults"])
                assert all(each in text for each in expected), text
                await kproxy.says("refused, nothing has changed")
                assert await kproxy.metric("kproxy_config_last_reload_successful") == 0

            config.clusters[0] |= {"detail": "everything", "lisen": "x"}
            config.clusters[1]["bootstrap"] = ["nowhere"]
            await refused("detail", "lisen", "did you mean listen?", "'nowhere' is not HOST:PORT")
            del config.clusters[0]["lisen"], config.clusters[1]["bootstrap"]
            config.clusters[1]["bootstrap"] = [second.address]
            config.clusters[0]["detail"] = "topics"
            config.clusters[1]["listen"] = taken  # by another program: only binding shows it
            await refused("two: listen", "another program listens there")
            config.clusters[1]["listen"] = f"{HOST}:{config.two}"
            config.process["record"] = str(config.file.parent / "tables")
            await refused("record (None -> ", "needs a restart")
            del config.process["record"]
            config.process["admin"] = taken
            await refused("admin", "another program listens there")
            config.process["admin"] = f"{HOST}:{config.admin}"
            await load.more()
            load.assert_same_connections()
            clusters = {each["name"]: each for each in await kproxy.json("/api/clusters")}
            assert clusters["two"]["listen"] == f"{HOST}:{config.two}"
            config.write()
            assert (await kproxy.json("/api/reload", post=True))["changes"] == ["cluster one: detail"]
            assert await kproxy.metric("kproxy_config_last_reload_successful") == 1
            assert await kproxy.metric('kproxy_config_reloads_total{outcome="refused"}') == 4
            assert (await kproxy.get("/api/reload"))[0] == 405  # asking changes nothing
        load.assert_lossless()
        busy.close()

    live(test(), TIMEOUT_S)


def test_a_file_that_changes_is_reloaded_if_the_settings_say_so(settings):
    """However it is replaced: written in place, or behind a link that moves as those of a ConfigMap do."""

    async def test():
        first, second = Brokers(1), Brokers(1)
        config = settings(first, second)
        config.process["watch_config"] = True
        config.write()
        folder = config.file.parent
        for name in ("v1", "v2"):
            (folder / name).mkdir()
        (folder / "v1" / "kproxy.toml").write_text(config.file.read_text())
        (folder / "..data").symlink_to("v1")
        mounted = folder / "mounted.toml"
        mounted.symlink_to("..data/kproxy.toml")
        async with kproxy_process(mounted, config.admin) as kproxy:
            (folder / "v2" / "kproxy.toml").write_text(config.file.read_text() + 'detail = "topics"\n')
            (folder / "..tmp").symlink_to("v2")
            (folder / "..tmp").replace(folder / "..data")
            await kproxy.says("reload by a change of the file: cluster two: detail")
            with (folder / "v2" / "kproxy.toml").open("a") as file:
                file.write("max_request_bytes = 1\n")
            assert "refused" in await kproxy.says("cluster[1].max_request_bytes")

    live(test(), TIMEOUT_S)


@pytest.mark.ring2
def test_a_new_version_that_fails_leaves_the_old_one_serving(settings):
    async def test():
        first, second = Brokers(1), Brokers(1)
        config = settings(first, second)
        config.process["workers"] = 2
        config.write()
        busy = socket.create_server((HOST, 0))
        async with kproxy_process(config.file, config.admin) as kproxy, Load(config.one) as load:
            own = set(descendants(kproxy.pid))
            files = resource.prlimit(kproxy.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(kproxy.pid, resource.RLIMIT_NOFILE, (3, files[1]))  # no descriptor for the channel
            kproxy.signal(signal.SIGUSR2)
            await kproxy.says("this one goes on: [Errno 24] Too many open files")
            resource.prlimit(kproxy.pid, resource.RLIMIT_NOFILE, files)
            good = config.file.read_text()
            for bad, reason in (
                ("nonsense", "not valid TOML"),
                (good.replace(f":{config.two}", f":{busy.getsockname()[1]}"), "it ended before it was ready"),
                # It never gets ready: its brokers do not answer.
                (good.replace(first.address, f"{HOST}:1"), "it was ended before"),
                (good.replace(first.address, f"{HOST}:1"), "it was killed before"),
            ):
                since = len(kproxy.lines)
                config.file.write_text(bad)
                kproxy.signal(signal.SIGUSR2)
                if "before" in reason and "ended before it was" not in reason:
                    await kproxy.says("listening cluster=two", since)
                    (child,) = (pid for pid in descendants(kproxy.pid) if pid not in own and os.getpgid(pid) == pid)
                    os.kill(child, signal.SIGKILL if "killed" in reason else signal.SIGTERM)
                await kproxy.says("has not taken over, this one goes on", since)
                await load.more()
                await until(lambda: set(descendants(kproxy.pid)) == own)  # not even a zombie is left
            assert await kproxy.metric("kproxy_failed_upgrades_total") == 5
            load.assert_same_connections()
            busy.close()
            config.file.write_text(good)
            kproxy.signal(signal.SIGUSR2)
            await kproxy.says("generation 2")
            await load.more()
        load.assert_lossless()

    live(test(), TIMEOUT_S)


class Unhurried:
    """A server that is being reconfigured when the upgrade is asked for."""

    def __init__(self, config):
        self.config, self.metrics, self.reloader = config, Metrics(), Reloader(self)
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    async def reconfigure(self, new, differing):
        self.begun.set()
        await self.goes_on.wait()
        self.config = new

    def hold(self, held):
        """It has no ports."""


def test_an_upgrade_begins_behind_the_reload_under_way(settings, caplog):
    """The new kproxy found ports in use that the reload had opened, and which nobody had given it."""

    async def test():
        config = load(flags={"listen": f"{HOST}:1", "bootstrap": f"{HOST}:2"})
        new = load(flags={"listen": f"{HOST}:3", "bootstrap": f"{HOST}:2"})
        server, ran_by = Unhurried(config), []
        ours, theirs = socket.socketpair()  # somebody stands in already
        process = Process(server, Inheritance(keeper=ours), {}, lambda: new)

        def start_child(link, keeper):
            ran_by.append(server.config)
            raise OSError("this test starts none")

        process._start_child = start_child
        reload = asyncio.create_task(server.reloader.reload("the test"))
        await server.begun.wait()
        upgrade = asyncio.create_task(process._upgrade("the test"))
        await until(lambda: "a new kproxy is started" in caplog.text)
        server.goes_on.set()
        assert (await reload).outcome == "applied"
        await upgrade
        assert ran_by == [new]
        ours.close()
        theirs.close()

    caplog.set_level("INFO")
    live(test(), TIMEOUT_S)


def test_during_the_start_a_reload_waits_and_an_upgrade_is_refused(caplog):
    """A reload found clusters that did not exist yet, and was lost; a new kproxy got some of the ports."""

    async def test():
        config = load(flags={"listen": f"{HOST}:1", "bootstrap": f"{HOST}:2"})
        new = load(flags={"listen": f"{HOST}:3", "bootstrap": f"{HOST}:2"})
        server, had_started = Unhurried(config), []

        def read():
            had_started.append(process._started.is_set())
            return new

        process = Process(server, Inheritance(), {}, read)
        process._signalled(signal.SIGUSR2)
        process._signalled(signal.SIGHUP)
        assert "SIGUSR2: refused, its start is under way" in caplog.text
        await asyncio.sleep(0)  # the reload has its turn
        process._started.set()
        await server.begun.wait()
        assert had_started == [True]
        await process._tasks.cancel()

    live(test(), TIMEOUT_S)


def test_whoever_ends_it_in_the_middle_of_an_upgrade_ends_both(settings):
    async def test():
        first, second = Brokers(1), Brokers(1)
        config = settings(first, second)
        config.process["drain_delay_s"] = 60  # time enough for the new one to take over
        config.write()
        async with kproxy_process(config.file, config.admin) as kproxy:
            kproxy.signal(signal.SIGUSR2)
            await kproxy.says("a new kproxy is started")
            kproxy.signal(signal.SIGTERM)
            await kproxy.says("has not taken over, this one drains: this one was asked to end")
            await until(lambda: not descendants(kproxy.pid))
            kproxy.signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                assert await kproxy.process.wait() == 0

    live(test(), TIMEOUT_S)


class Mute(Brokers):
    """Answers no Heartbeat, so a client that sends one keeps a kproxy draining."""

    def _answer(self, api, version, correlation):
        return b"" if api == HEARTBEAT else super()._answer(api, version, correlation)


def test_signals_reach_the_third_kproxy_while_the_first_still_drains(settings):
    """They went to the second, which had ended or drained: whoever knows the first one's id could end none."""

    async def test():
        first, second = Mute(1), Brokers(1)
        config = settings(first, second)
        config.process["drain_timeout_s"] = 600
        config.write()
        async with kproxy_process(config.file, config.admin) as kproxy:
            client = await Wire.dial(config.one)
            await client.send(request(HEARTBEAT, 4, 7))
            await until(lambda: 7 in Brokers.seen)
            for generation in (2, 3):
                kproxy.signal(signal.SIGUSR2)
                await kproxy.says(f"generation {generation}")
            since = len(kproxy.lines)
            kproxy.signal(signal.SIGHUP)
            await kproxy.says("reload by SIGHUP: the settings are those that run", since)
            kproxy.signal(signal.SIGTERM)
            await kproxy.says("stopped in", since)
            async with asyncio.timeout(PATIENCE_S):
                while kproxy.process.returncode is None:  # the third may take one more while it ends
                    kproxy.signal(signal.SIGTERM)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(kproxy.process.wait(), 0.5)
            assert kproxy.process.returncode == 0, kproxy.lines[since:]
            client.close()

    live(test(), TIMEOUT_S)


@pytest.mark.ring2
def test_who_stands_in_passes_signals_on(settings):
    """The process that the test has started is the kproxy of the moment, for whoever watches it: by each signal."""

    async def test():
        first, second = Brokers(1), Brokers(1)
        config = settings(first, second)
        async with kproxy_process(config.file, config.admin) as kproxy:
            for generation in (2, 3):
                since = len(kproxy.lines)
                kproxy.signal(signal.SIGUSR2)
                await kproxy.says(f"generation {generation}", since)
                await kproxy.says("stopped in", since)
                await until(lambda: stands_in(kproxy))
            since = len(kproxy.lines)
            kproxy.signal(signal.SIGHUP)
            await kproxy.says("reload by SIGHUP", since)
            (current,) = descendants(kproxy.pid)
            os.kill(current, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                assert await kproxy.process.wait() == 128 + signal.SIGKILL
        async with kproxy_process(config.file, config.admin) as kproxy:
            kproxy.signal(signal.SIGUSR2)
            await kproxy.says("generation 2")
            await kproxy.says("stopped in")
            await until(lambda: stands_in(kproxy))
            (current,) = descendants(kproxy.pid)
            os.kill(kproxy.pid, signal.SIGKILL)  # then nobody is left to end it
            await until(lambda: not exists(current))

    live(test(), TIMEOUT_S)


def test_who_stands_in_needs_no_interpreter_that_was_removed_since(settings, tmp_path):
    """The first process ended with a traceback at the end of its drain, and the new one with it."""

    async def test():
        first, second = Mute(1), Brokers(1)
        config = settings(first, second)
        config.process["drain_timeout_s"] = 600
        config.write()
        python = tmp_path / "python"
        python.symlink_to(sys.executable)
        kproxy = Kproxy(config.file, config.admin, (str(python), *KPROXY[1:]))
        await kproxy.start(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        try:
            await kproxy.ready()
            client = await Wire.dial(config.one)
            await client.send(request(HEARTBEAT, 4, 8))
            await until(lambda: 8 in Brokers.seen)
            kproxy.signal(signal.SIGUSR2)
            await kproxy.says("generation 2")
            python.unlink()
            client.close()
            await kproxy.says("the kproxy before this one has ended")
            assert await kproxy.end() == 0
        finally:
            await kproxy.kill()

    live(test(), TIMEOUT_S)


def test_nobody_needs_the_package_that_was_removed_since(settings, tmp_path):
    """The process that should stand in was started from the package: it ended, and the new kproxy with it."""
    root = Path(kproxy_package.__file__).parents[1].resolve()
    installed, removed = tmp_path / "installed", tmp_path / "removed"
    shutil.copytree(root / "kproxy", installed / "kproxy", ignore=shutil.ignore_patterns("__pycache__"))
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != root]
    python = Path(sys.executable).resolve()  # not that of a virtual environment, which has the package as well

    async def test():
        first, second = Mute(1), Brokers(1)
        config = settings(first, second)
        config.process["drain_timeout_s"] = 600
        config.write()
        kproxy = Kproxy(config.file, config.admin, (str(python), *KPROXY[1:]))
        await kproxy.start(PYTHONPATH=os.pathsep.join([str(installed), *elsewhere]), PYTHONSAFEPATH="1")
        try:
            await kproxy.ready()
            client = await Wire.dial(config.one)
            await client.send(request(HEARTBEAT, 4, 9))
            await until(lambda: 9 in Brokers.seen)
            kproxy.signal(signal.SIGUSR2)
            await kproxy.says("generation 2")
            installed.rename(removed)
            client.close()
            await kproxy.says("the kproxy before this one has ended")
            await until(lambda: stands_in(kproxy))
            since = len(kproxy.lines)
            kproxy.signal(signal.SIGUSR2)  # there is no kproxy to upgrade to
            await kproxy.says("No module named 'kproxy'", since)
            await kproxy.says(
                "the new kproxy has not taken over, this one goes on: it ended before it was ready", since
            )
            async with Load(config.two) as load:
                await load.more()
            load.assert_lossless()
            kproxy.signal(signal.SIGHUP)
            await kproxy.says("reload by SIGHUP: the settings are those that run", since)
            assert await kproxy.end() == 0
        finally:
            await kproxy.kill()

    live(test(), TIMEOUT_S)
