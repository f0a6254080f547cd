"""One insight process follows groups for any number of relays; relays continue if it ends."""

import asyncio
import json
import os
import pickle
import resource
import signal
import stat
import threading
from contextlib import suppress
from pathlib import Path
from time import time_ns
from urllib.error import HTTPError

import pyarrow.parquet as pq
import pytest

from kproxy.admin.parameters import NotNow
from kproxy.insight.membership.groups import MAX_GROUPS as FOLLOWED
from kproxy.metrics import Metrics
from kproxy.metrics.counters.groups import MAX_GROUPS, MAX_PARTITIONS, InsightCells
from kproxy.protocol.apis import HEARTBEAT, METADATA
from kproxy.proxy.filters.feed import QUEUE_BYTES, Feed, KeptExchange, Whose
from kproxy.proxy.process.knowledge import feed_link
from kproxy.proxy.process.knowledge.feed_link import GROUPS_PER_SLICE, FeedLink
from tests.proxy.live import Wire, live, request, response
from tests.proxy.process.workers.test_parent import Run, alive, children, in_proc, kproxy, total

JOIN, SYNC = 11, 14
LEADERLESS = {"partitionIndex": 0, "leaderId": -1, "replicaNodes": [1], "isrNodes": []}
PATIENCE_S = 120
HOUR_NS = 3600 * 10**9


async def exchanged(client: Wire, broker: Wire, asked: bytes, answer: bytes) -> None:
    await client.send(asked)
    assert await broker.frame() == asked
    await broker.send(answer)
    assert await client.frame() == answer


async def rebalance(pairs: list[tuple[Wire, Wire]], group: str, generation: int) -> None:
    """All members join and get their assignments; the first one leads."""
    ids = [f"m{number}" for number in range(len(pairs))]
    protocols = [{"name": "range", "metadata": b""}]
    for number, (client, broker) in enumerate(pairs):
        asked = {"groupId": group, "memberId": ids[number], "protocolType": "connect", "protocols": protocols}
        body = {"generationId": generation, "protocolName": "range", "leader": "m0", "memberId": ids[number]}
        if number == 0:
            body["members"] = [{"memberId": id_, "metadata": b""} for id_ in ids]
        await exchanged(client, broker, request(JOIN, 5, generation, asked), response(JOIN, 5, generation, body))
    for number, (client, broker) in enumerate(pairs):
        asked = {"groupId": group, "memberId": ids[number], "generationId": generation}
        if number == 0:
            asked["assignments"] = [{"memberId": id_, "assignment": b""} for id_ in ids]
        await exchanged(client, broker, request(SYNC, 3, generation, asked), response(SYNC, 3, generation))


def set_in_kproxy(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Run this statement about `link` in each kproxy that the test starts."""
    (folder / "sitecustomize.py").write_text(f"import kproxy.proxy.process.knowledge.feed_link as link\n{code}\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)


async def groups(here: Run, query: str = "") -> list[dict]:
    while True:
        with suppress(HTTPError):  # a process that has just started, or a busy one, does not answer in time: ask again
            return json.loads(await here.get(f"/api/groups{query}"))


async def known(here: Run, group: str, generation: int) -> dict:
    """The API's description of a group, once all members of that generation have their assignments."""
    found: list[dict] = []

    async def is_there() -> bool:
        found[:] = [each for each in await groups(here) if each["group"] == group]
        last = found[0]["last_rebalance"] if found else None
        return last is not None and last["generation"] == generation and found[0]["state"] == "Stable"

    await here.until(is_there)
    return found[0]


def test_a_rebalance_appears_in_the_metrics_and_in_api_groups():
    async def test(workers: int):
        async with kproxy("--detail", "topics", workers=workers) as here:
            pid = int((await here.logged("groups and leaders are followed by process")).split()[-1])
            assert os.getsid(pid) == pid  # Ctrl-C in a terminal does not reach the process, which may still be loading
            before = await here.scrape()
            for name, label in (("kproxy_rebalance_causes", "cause"), ("kproxy_leadership_changes", "change")):
                assert {value for series, value in before.items() if series.startswith(name)} == {0}, label
            pairs = [await here.connect() for _ in range(3)]
            await rebalance(pairs[:2], "g", 1)
            await rebalance(pairs, "g", 2)
            found = await known(here, "g", 2)
            assert (found["protocol"], found["strategy"], found["member_count"]) == ("classic", "range", 3)
            assert found["type"] == "connect"
            assert [member["member_id"] for member in found["members"]] == ["m0", "m1", "m2"]
            last = found["last_rebalance"]
            assert (last["cause"], last["member_id"], last["members_after"]) == ("member_joined", "m2", 3)
            client, broker = pairs[0]
            for error in (0, 0, 25, 27):
                asked = request(HEARTBEAT, 4, 9, {"groupId": "g", "memberId": "m0", "generationId": 2})
                await exchanged(client, broker, asked, response(HEARTBEAT, 4, 9, {"errorCode": error}))

            async def is_counted() -> bool:
                samples = await here.scrape()
                return total(samples, "kproxy_group_failures_total", group="g", operation="heartbeat") == 1

            await here.until(is_counted)
            samples = await here.scrape()
            assert total(samples, "kproxy_group_rebalances_total", group="g") == 2
            assert total(samples, "kproxy_group_members", group="g") == 3
            assert total(samples, "kproxy_group_generation", group="g") == 2
            # The coordinator answers JoinGroup requests when all members have joined.
            assert total(samples, "kproxy_group_rebalancing", group="g") == 1
            assert total(samples, "kproxy_group_rebalance_seconds_count", group="g") == 2
            assert total(samples, "kproxy_rebalance_causes_total", cause="member_joined") == 2
            assert total(samples, "kproxy_insight_left_out_total") == 0
            (row,) = json.loads(await here.get("/api/live"))["groups"]
            assert (row[1], row[3], row[5], row[8:]) == ("g", 3, 2, ["classic", "connect"])
            await rebalance(pairs[:1], "another", 7)
            await known(here, "another", 7)
            assert [each["group"] for each in await groups(here, "?limit=1")] == ["another"]
            assert [each["group"] for each in await groups(here, "?after=default/another")] == ["g"]

    for workers in (1, 2):
        live(test(workers), PATIENCE_S)


def test_without_detail_no_insight_process_runs():
    async def test():
        async with kproxy(workers=1) as here:
            client, broker = await here.connect()
            await rebalance([(client, broker)], "g", 1)
            assert await groups(here) == [] and not children(here.process.pid)
            assert not total(await here.scrape(), "kproxy_rebalance_causes_total")

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_a_killed_insight_process_is_replaced_and_relays_continue(monkeypatch, tmp_path):
    set_in_kproxy(
        monkeypatch, tmp_path, "link._FIRST_PAUSE_S = 5.0"
    )  # time for a request before the next process starts, also on a busy machine

    async def test():
        async with kproxy("--detail", "topics", workers=1) as here:
            line = await here.logged("groups and leaders are followed by process")
            client, broker = await here.connect()
            os.kill(int(line.split()[-1]), signal.SIGKILL)
            await here.logged("the process that follows groups has ended")
            with pytest.raises(HTTPError) as refused:  # an empty list would mean that there are no groups
                await here.get("/api/groups")
            assert (refused.value.code, refused.value.headers["Retry-After"]) == (503, "1")
            assert b"is being started: ask again" in refused.value.read()
            assert await alive(client, broker)

            async def again() -> bool:
                return sum("groups and leaders are followed by process" in each for each in here.lines) == 2

            await here.until(again)
            await rebalance([(client, broker)], "g", 3)
            assert (await known(here, "g", 3))["member_count"] == 1
            samples = await here.scrape()
            assert total(samples, "kproxy_insight_restarts_total", why="ended") == 1
            assert total(samples, "kproxy_insight_restarts_total", why="hung") == 0
            here.process.send_signal(signal.SIGTERM)
            assert await here.process.wait() == 0

    live(test(), PATIENCE_S)


def test_a_list_of_groups_fails_if_the_process_ends_between_two_slices():
    class Ending:
        async def ask(self, _: str, __: tuple[str, str], wanted: int, *, timeout_s: float) -> list[dict[str, str]]:
            link._channel = None
            return [{"cluster": "c", "group": f"g{number}"} for number in range(wanted)]

    link = FeedLink(Metrics(), lambda: None)
    link._cells["c"] = b""
    link._channel = Ending()

    async def test():
        slices = link.api_groups({})
        assert len(await anext(slices)) == GROUPS_PER_SLICE
        with pytest.raises(NotNow):
            await anext(slices)

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_a_hung_insight_process_is_killed_and_replaced(monkeypatch, tmp_path):
    set_in_kproxy(monkeypatch, tmp_path, "link.BEAT_S, link.HANGS_S = 0.1, 3.0")

    async def test(workers: int):
        async with kproxy("--detail", "topics", workers=workers) as here:
            hung = int((await here.logged("groups and leaders are followed by process")).split()[-1])
            client, broker = await here.connect()
            os.kill(hung, signal.SIGSTOP)
            await here.logged(f"(pid {hung}) hangs: no answer for 3 s")

            async def again() -> bool:
                return sum("groups and leaders are followed by process" in each for each in here.lines) == 2

            await here.until(again)
            assert hung not in children(here.process.pid)
            await rebalance([(client, broker)], "g", 3)
            assert (await known(here, "g", 3))["member_count"] == 1
            assert total(await here.scrape(), "kproxy_insight_restarts_total", why="hung") == 1

    for workers in (1, 2):
        live(test(workers), PATIENCE_S)


def test_cells_are_unpickled_once_until_they_change():
    metrics = Metrics()
    link = FeedLink(metrics, lambda: None)
    link._show("c")
    known = InsightCells()
    link._take("c", pickle.dumps(known))
    first = metrics.cluster("c").insight()
    link._take("c", pickle.dumps(known))  # the same cells arrive again
    assert metrics.cluster("c").insight() is first
    known.groups.cell_for("g", 1, 0)
    link._take("c", pickle.dumps(known))
    assert "g" in metrics.cluster("c").insight().groups.cells


def test_a_clock_step_does_not_delay_exchanges(monkeypatch):
    """Packets of `kproxy watch` have the time of day, which may jump by an hour, for example after a suspend."""
    monkeypatch.setattr(feed_link, "BEAT_S", 0.05)

    async def test():
        metrics, feed, gave = Metrics(), Feed(), asyncio.Event()

        def give() -> None:
            feed.use(link.stream())
            gave.set()

        link = FeedLink(metrics, give)
        link.follow({"c"})
        await gave.wait()
        metrics.clock_offset_ns += HOUR_NS
        whose = Whose("c", "10.0.0.1", 1, 1, "watch:eth0", None)
        asked = {"groupId": "g", "memberId": "m", "protocolType": "connect", "protocols": []}
        body = {"generationId": 1, "leader": "m", "memberId": "m", "members": [{"memberId": "m", "metadata": b""}]}
        frames = request(JOIN, 5, 1, asked), response(JOIN, 5, 1, body)
        now_ns = time_ns() + HOUR_NS
        feed._put(KeptExchange(whose, JOIN, 5, 1, now_ns, now_ns, *frames), {})
        found = []
        while not found:
            with suppress(NotNow):  # the process has only just started
                found = [each async for part in link.api_groups({}) for each in part]
            await asyncio.sleep(0.05)
        assert [(each["group"], each["generation"]) for each in found] == [("g", 1)]
        await asyncio.to_thread(feed.close)
        await link.close()

    live(test(), PATIENCE_S)


# Divisor of the caps, so that a flood reaches them in seconds. `./dev knowledge flood` uses the full caps.
SHARE = 1 if "KNOWLEDGE_LONG" in os.environ else 20
CAPS = """
import kproxy.insight.membership.groups as groups, kproxy.insight.topics as topics, kproxy.insight.topology as topology
import kproxy.metrics.counters.groups as cells
groups.MAX_GROUPS //= {0}
groups.MAX_WEIGHT //= {0}
topics.MAX_TOPICS //= {0}
topology.MAX_TOPICS //= {0}
cells.MAX_PARTITIONS //= {0}
"""
FLOOD_GROUPS, FLOOD_TOPICS = 10_000 // SHARE, 34_000 // SHARE  # invented by one client in each round: beyond all caps
MEMBERS = 4  # per group
TOGETHER = 2000 // SHARE
FIRST = "000000"  # a placeholder in encoded frames


def invented(number: int, frames: bytes, count: int) -> bytes:
    """The frames with the placeholder replaced by each of `count` numbers."""
    return b"".join(frames.replace(FIRST.encode(), b"%06d" % each) for each in range(number, number + count))


@pytest.mark.ring2
def test_memory_and_scrapes_stop_growing_when_invented_groups_reach_the_caps(monkeypatch, tmp_path):
    """30,000 groups with 120,000 members and 102,000 topics, divided by SHARE. The first round reaches the caps."""
    (tmp_path / "sitecustomize.py").write_text(CAPS.format(SHARE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    group, ids = f"g{FIRST}", [f"m{FIRST}-{number}" for number in range(MEMBERS)]
    join = {"groupId": group, "memberId": ids[0], "protocolType": "connect"}
    answer = {"generationId": 1, "leader": ids[0], "memberId": ids[0], "members": [{"memberId": each} for each in ids]}
    sync = {"groupId": group, "memberId": ids[0], "generationId": 1, "assignments": [{"memberId": ids[0]}]}
    asked_each = request(JOIN, 5, 1, join) + request(SYNC, 3, 1, sync)
    answers_each = response(JOIN, 5, 1, answer) + response(SYNC, 3, 1, {"errorCode": 25})

    async def test():
        async with kproxy("--detail", "topics", workers=1) as here:
            line = await here.logged("groups and leaders are followed by process")
            client, broker = await here.connect()
            seen = []

            async def both(asked: bytes, answers: bytes) -> None:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(client.send(asked))
                    assert await broker.read(len(asked)) == asked
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(broker.send(answers))
                    assert await client.read(len(answers)) == answers

            async def all_counted(count: int) -> None:
                """The insight process has caught up, and no exchange was dropped on the way to it."""

                async def is_counted() -> bool:
                    samples = await here.scrape()
                    assert not total(samples, "kproxy_insight_left_out_total", why="queue_full")
                    return total(samples, "kproxy_group_failures_total") == count

                await here.until(is_counted)

            for part in range(3):
                for number in range(part * FLOOD_TOPICS, (part + 1) * FLOOD_TOPICS, TOGETHER):
                    names = [
                        {"name": f"t{each}", "partitions": [LEADERLESS]} for each in range(number, number + TOGETHER)
                    ]
                    await both(request(METADATA, 8, 7, {}), response(METADATA, 8, 7, {"topics": names}))
                for number in range(part * FLOOD_GROUPS, (part + 1) * FLOOD_GROUPS, 50):
                    await both(invented(number, asked_each, 50), invented(number, answers_each, 50))
                    if number % 2000 == 1950:
                        await all_counted(number + 50)
                await all_counted((part + 1) * FLOOD_GROUPS)
                text = await here.get("/metrics")
                pids = here.process.pid, int(line.split()[-1])
                seen.append((len(text), *(resident_bytes(pid) for pid in pids)))
            samples = await here.scrape()
            series = {each for each in samples if each.startswith("kproxy_group_failures_total")}
            assert len(series) == 4 * (MAX_GROUPS + 1)
            assert total(samples, "kproxy_insight_left_out_total", why="not_followed") >= 2 * FLOOD_GROUPS
            assert total(samples, "kproxy_partitions_offline") == MAX_PARTITIONS // SHARE
            known, after = 0, ""
            while page := await groups(here, f"?limit=1000&after={after}"):  # in slices, with other work between them
                known, after = known + len(page), f"default/{page[-1]['group']}"
                assert {each["member_count"] for each in page} == {MEMBERS}
            assert FLOOD_GROUPS / 4 < known <= FOLLOWED // SHARE and after == f"default/g{3 * FLOOD_GROUPS - 1:06d}"
            first, second, last = seen
            assert last[0] < 1.1 * first[0], seen
            assert last[1] < first[1] + QUEUE_BYTES and last[2] < 1.25 * second[2] < 500 << 20, seen

    live(test(), 3 * PATIENCE_S)


def resident_bytes(pid: int) -> int:
    return int((in_proc(pid, "statm")).read_text().split()[1]) * resource.getpagesize()


def test_rebalances_and_group_events_are_recorded_with_the_exchanges(tmp_path):
    """Also the last events, and a rebalance that has not ended when kproxy exits."""

    def dataset_rows(place, table):
        return [row for file in (place / table).glob("*.parquet") for row in pq.ParquetFile(file).read().to_pylist()]

    async def test(workers: int, place: Path):
        async with kproxy("--detail", "topics", "--record", str(place), workers=workers) as here:
            await here.logged("groups and leaders are followed by process")
            pairs = [await here.connect() for _ in range(2)]
            await rebalance(pairs, "g", 1)
            client, broker = pairs[0]
            asked = {"groupId": "open", "memberId": "m", "protocolType": "connect", "protocols": []}
            answer = {"generationId": 5, "protocolName": "x", "leader": "n", "memberId": "m"}
            await exchanged(client, broker, request(JOIN, 5, 9, asked), response(JOIN, 5, 9, answer))
            here.process.send_signal(signal.SIGTERM)
            assert await here.process.wait() == 0
        rebalances = {(row["group_id"], row["generation"]): row for row in dataset_rows(place, "rebalances")}
        assert rebalances["g", 1]["members_after"] == 2 and rebalances["g", 1]["ended_ns"]
        assert rebalances["open", 5]["ended_ns"] is None
        exchanges = {(row["connection"], row["number"]): row for row in dataset_rows(place, "exchanges")}
        events = [row for row in dataset_rows(place, "group_events") if row["event"] == "join_answered"]
        assert [exchanges[row["connection"], row["number"]]["api"] for row in events] == ["JoinGroup"] * 3
        assert {row["source"] for row in events} == {"live:default"}
        assert not [name for name in os.listdir(place) if name.startswith(".unfinished")]  # noqa: PTH208

    for workers in (1, 2):
        live(test(workers, tmp_path / str(workers)), PATIENCE_S)


def test_errors_of_the_insight_process_are_log_lines_of_kproxy(tmp_path):
    """Here it cannot write into the folder of the recording, which a file has replaced."""

    async def test():
        place = tmp_path / "tables"
        async with kproxy("--detail", "topics", "--record", str(place), "--log-format", "json", workers=1) as here:
            await here.logged("groups and leaders are followed by process")
            place.rename(tmp_path / "moved")
            place.touch()
            await rebalance([await here.connect() for _ in range(2)], "g", 1)

            async def is_known() -> bool:
                return total(await here.scrape(), "kproxy_group_rebalances_total") > 0

            await here.until(is_known)  # a process that still loads would be killed
            here.process.send_signal(signal.SIGTERM)
            await here.process.wait()
            await here.logged("rows of insight are lost")
            logged = [json.loads(line) for line in here.lines]
        (lost,) = [line for line in logged if "rows of insight are lost" in line["message"]]
        assert (lost["level"], lost["logger"]) == ("error", "kproxy.recorder")

    live(test(), PATIENCE_S)


def test_rows_that_the_insight_process_cannot_write_are_counted(monkeypatch, tmp_path):
    """The rows are counted at once. The recorder of exchanges has too few rows for a file yet, and has lost none."""
    (tmp_path / "sitecustomize.py").write_text("import kproxy.tables.live.knowledge_recorder as it\nit.ROLL_S = 0.1\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))

    async def test():
        place = tmp_path / "tables"
        async with kproxy("--detail", "topics", "--record", str(place), workers=1) as here:
            await here.logged("groups and leaders are followed by process")
            place.rename(tmp_path / "moved")
            place.touch()
            await rebalance([await here.connect() for _ in range(2)], "g", 1)

            async def is_counted() -> bool:
                return total(await here.scrape(), "kproxy_recorder_dropped_total") > 0

            await here.until(is_counted)

    live(test(), PATIENCE_S)


def test_a_cancelled_start_still_passes_the_channel_to_the_process(monkeypatch):
    """kproxy may stop first: the descriptor that the process inherits must still be its end of the channel."""
    asked, goes_on, found = threading.Event(), threading.Event(), []

    def popen(*_, pass_fds, **__):
        asked.set()
        assert goes_on.wait(PATIENCE_S)
        found.append(os.fstat(pass_fds[0]).st_mode)
        raise OSError("not started here")

    async def run() -> None:
        link = FeedLink(Metrics(), lambda: None)
        link.follow({"default"})
        await asyncio.to_thread(asked.wait, PATIENCE_S)
        assert link._starting is not None
        link._starting.cancel()
        await asyncio.gather(link._starting, return_exceptions=True)
        goes_on.set()

    monkeypatch.setattr(feed_link.subprocess, "Popen", popen)
    asyncio.run(run())
    assert [stat.S_ISSOCK(mode) for mode in found] == [True]
