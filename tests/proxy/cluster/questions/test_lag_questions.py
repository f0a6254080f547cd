"""kproxy's own requests for lag: their versions, its reaction to refusals, and that no fault ends the monitor.

The scene with real brokers is in tests/broker/test_lag.py.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kproxy.metrics import Metrics
from kproxy.metrics.consumers.lag import Lags
from kproxy.metrics.consumers.offsets import OFFSET_COMMIT
from kproxy.metrics.counters.named import Topics
from kproxy.protocol import codec
from kproxy.protocol.apis import (
    API_VERSIONS,
    FIND_COORDINATOR,
    GROUP_AUTHORIZATION_FAILED,
    LIST_OFFSETS,
    METADATA,
    OFFSET_FETCH,
    TOPIC_AUTHORIZATION_FAILED,
)
from kproxy.protocol.schema import schema
from kproxy.proxy.cluster.bootstrap import BootstrapAddresses
from kproxy.proxy.cluster.questions import lag_questions
from kproxy.proxy.cluster.questions.lag_questions import LagQuestions, OwnLags
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.upstream.connector import BrokerConnector
from kproxy.proxy.upstream.dial import Dialler
from kproxy.proxy.upstream.loops import LoopGuard
from kproxy.proxy.upstream.resolver import Resolver
from tests.proxy.live import HOST, live

NOT_LEADER = 6
NEWEST = {
    key: schema().apis[key].request.versions[-1] for key in (METADATA, LIST_OFFSETS, OFFSET_FETCH, FIND_COORDINATOR)
}
BEFORE_BATCHES = {METADATA: 4, LIST_OFFSETS: 1, OFFSET_FETCH: 2, FIND_COORDINATOR: 0}  # Kafka 0.11

Offsets = dict[tuple[str, int], int]


class Brokers:
    """Answers as brokers do: `ends` of logs, what groups have `committed`, and an error for what is in `refused`.

    leader, coordinator: the node id that it names; all of them are at its one port.
    """

    def __init__(self, offers: dict[int, int]) -> None:
        self.offers = offers
        self.ends: Offsets = {}
        self.committed: dict[str, Offsets] = {}
        self.refused: dict[str, int] = {}  # topics and groups
        self.leader = self.coordinator = 1
        self.not_leader = False
        self.nodes = (1, 2)
        self.closes_on: set[int] = set()
        self.asked: list[tuple[int, int]] = []  # API key and version
        self.before_answer: Callable[[int], None] = lambda _: None
        self.port = 0

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._talk, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
                header, body = codec.decode_request(frame)
                key, version = header["requestApiKey"], header["requestApiVersion"]
                self.asked.append((key, version))
                if key in self.closes_on:
                    return
                answer = {
                    API_VERSIONS: self._offers,
                    METADATA: self._metadata,
                    FIND_COORDINATOR: self._coordinators,
                    OFFSET_FETCH: self._offsets,
                    LIST_OFFSETS: self._ends,
                }[key](version, body)
                self.before_answer(key)
                answered = codec.encode_response(key, version, {"correlationId": header["correlationId"]}, answer)
                writer.write(len(answered).to_bytes(4) + answered)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def _offers(self, version: int, body: Any) -> Any:
        return {"apiKeys": [{"apiKey": key, "minVersion": 0, "maxVersion": most} for key, most in self.offers.items()]}

    def _metadata(self, version: int, body: Any) -> Any:
        topics = [
            {
                "name": topic["name"],
                "errorCode": self.refused.get(topic["name"], 0),
                "partitions": [
                    {"partitionIndex": number, "leaderId": self.leader}
                    for name, number in self.ends
                    if name == topic["name"]
                ],
            }
            for topic in body["topics"]
        ]
        brokers = [{"nodeId": node_id, "host": HOST, "port": self.port} for node_id in self.nodes]
        return {"brokers": brokers, "topics": topics}

    def _coordinators(self, version: int, body: Any) -> Any:
        def found(group: str) -> dict[str, Any]:
            code = self.refused.get(group, 0)
            return {"errorCode": code, "nodeId": self.coordinator, "host": HOST, "port": self.port}

        if version < 4:
            return found(body["key"])
        return {"coordinators": [{"key": group, **found(group)} for group in body["coordinatorKeys"]]}

    def _offsets(self, version: int, body: Any) -> Any:
        def group(group_id: str) -> dict[str, Any]:
            offsets = self.committed.get(group_id, {})
            topics = [
                {"name": topic, "partitions": [{"partitionIndex": number, "committedOffset": offset}]}
                for (topic, number), offset in offsets.items()
                if topic not in self.refused  # Kafka leaves them out
            ]
            return {"topics": topics, "errorCode": 0}

        if version >= 8:
            return {"groups": [{"groupId": each["groupId"], **group(each["groupId"])} for each in body["groups"]]}
        return group(body["groupId"])

    def _ends(self, version: int, body: Any) -> Any:
        topics = [
            {
                "name": topic["name"],
                "partitions": [
                    {
                        "partitionIndex": each["partitionIndex"],
                        "offset": self.ends[topic["name"], each["partitionIndex"]],
                        "errorCode": NOT_LEADER if self.not_leader else 0,
                    }
                    for each in topic["partitions"]
                ],
            }
            for topic in body["topics"]
        ]
        return {"topics": topics}


class Asking:
    """A cluster that kproxy queries, and the offsets that kproxy learned."""

    def __init__(self, brokers: Brokers) -> None:
        self.brokers = brokers
        self.metrics = Metrics()
        self.cells = self.metrics.cluster("main")
        self.lags = self.cells.lags = Lags(Topics())
        dialler = Dialler(Resolver(), LoopGuard(lambda *_: False), 10.0)
        bootstrap = BootstrapAddresses([Address(HOST, brokers.port)])
        self.questions = LagQuestions(
            self.cells,
            BrokerConnector(dialler),
            bootstrap,
            lambda _: None,
            OwnLags(self.metrics),
            15.0,
            self.metrics.now_ns,
        )

    def commit(self, group: str, key: tuple[str, int], offset: int) -> None:
        """A commit that passes, and that the coordinator knows."""
        self.lags._commit(group, key, offset, self.metrics.now_ns(), OFFSET_COMMIT)
        self.brokers.committed.setdefault(group, {})[key] = offset

    def behind(self) -> dict[tuple[str, str], int | None]:
        found = dict(self.lags.shown(self.metrics.now_ns(), self.metrics.now_ns()))
        return {(group, topic): lag.records for group, topic, lag in found["group"]}

    @property
    def counted(self) -> dict[tuple[str, str], int]:
        return {of: count for of, count in self.cells.lag_questions.items() if count}


def asking(test: "Callable[[Asking], Any]", offers: dict[int, int] = NEWEST) -> None:
    async def run() -> None:
        brokers = Brokers(offers)
        async with await brokers.serve():
            await test(Asking(brokers))

    live(run())


@pytest.mark.parametrize("offers", [NEWEST, BEFORE_BATCHES], ids=["newest", "0.11"])
def test_kproxy_asks_for_the_offsets_that_traffic_does_not_show(offers: dict[int, int]) -> None:
    async def test(here: Asking) -> None:
        here.commit("g", ("t", 0), 3)
        here.brokers.ends = {("t", 0): 10, ("t", 1): 7}
        here.brokers.committed["g"]["t", 1] = 5  # by way of another kproxy
        assert here.behind() == {("g", "t"): None}
        assert await here.questions.round()
        assert here.behind() == {("g", "t"): 9}
        here.brokers.ends["t", 0] = 4  # created again
        here.brokers.committed["g"] = {("t", 0): 1}
        assert await here.questions.round()
        assert here.behind() == {("g", "t"): 3}
        assert here.counted == {("Metadata", "answered"): 1, ("FindCoordinator", "answered"): 1} | {
            (api, "answered"): 2 for api in ("OffsetFetch", "ListOffsets")
        }
        newest = {key: min(offers[key], 9) if key == OFFSET_FETCH else offers[key] for key in offers}
        assert {of for of in here.brokers.asked if of[0] != API_VERSIONS} == set(newest.items())

    asking(test, offers)


def test_kproxy_still_asks_for_a_deleted_group() -> None:
    """It may commit again where kproxy does not see it."""

    async def test(here: Asking) -> None:
        here.brokers.ends = {("t", 0): 10}
        here.commit("deleted here", ("t", 0), 3)
        here.lags._groups_gone({"deleted here"}, here.metrics.now_ns())
        here.commit("deleted elsewhere", ("t", 0), 3)
        here.brokers.committed.clear()
        assert await here.questions.round()
        assert here.behind() == {}
        here.brokers.committed = {"deleted here": {("t", 0): 4}, "deleted elsewhere": {("t", 0): 5}}
        assert await here.questions.round()
        assert here.behind() == {("deleted here", "t"): 6, ("deleted elsewhere", "t"): 5}

    asking(test)


def test_an_offset_in_traffic_after_the_request_is_newer_than_its_response() -> None:
    async def test(here: Asking) -> None:
        here.commit("g", ("t", 0), 3)
        here.commit("deleted", ("t", 0), 3)
        here.brokers.ends = {("t", 0): 10}

        def passes(key: int) -> None:
            if key == OFFSET_FETCH:  # its answer is made, and has 3
                here.lags._commit("g", ("t", 0), 8, here.metrics.now_ns(), OFFSET_COMMIT)
                here.lags._groups_gone({"deleted"}, here.metrics.now_ns())

        here.brokers.before_answer = passes
        assert await here.questions.round()
        assert here.behind() == {("g", "t"): 2}

    asking(test)


def test_a_broker_that_is_not_the_one_any_more() -> None:
    async def test(here: Asking) -> None:
        here.commit("g", ("t", 0), 3)
        here.brokers.ends = {("t", 0): 10}
        here.brokers.leader = 9  # which no answer says the address of
        assert await here.questions.round()
        assert here.behind() == {("g", "t"): None}
        here.brokers.leader = 2
        here.brokers.not_leader = True
        assert await here.questions.round()
        here.brokers.not_leader = False
        assert await here.questions.round()
        assert here.behind() == {("g", "t"): 7}
        assert here.counted["ListOffsets", "failed"] == 1

    asking(test)


def test_offsets_that_kproxy_may_not_describe_stay_as_traffic_showed_them(caplog: pytest.LogCaptureFixture) -> None:
    async def test(here: Asking) -> None:
        here.commit("g", ("hidden", 0), 3)
        here.commit("g", ("t", 0), 3)
        here.commit("secret", ("t", 0), 2)
        here.brokers.ends = {("t", 0): 10, ("hidden", 0): 9}
        here.brokers.refused = {"hidden": TOPIC_AUTHORIZATION_FAILED, "secret": GROUP_AUTHORIZATION_FAILED}
        for _ in range(3):
            assert await here.questions.round()
        assert here.behind() == {("g", "t"): 7, ("secret", "t"): 8, ("g", "hidden"): None}
        assert here.counted["Metadata", "not_authorized"] == here.counted["FindCoordinator", "not_authorized"] == 3
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(lines) == 2  # once each
        assert "FindCoordinator of secret is refused to kproxy, GROUP_AUTHORIZATION_FAILED" in caplog.text
        assert "ask_interval_s = 0" in lines[0]

    asking(test)


def test_offsets_of_a_topic_that_kproxy_may_no_longer_describe_are_not_taken_for_deleted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(here: Asking) -> None:
        for topic in ("hidden", "t"):
            here.commit("g", (topic, 0), 3)
            here.brokers.ends[topic, 0] = 10
        assert await here.questions.round()
        here.brokers.refused = {"hidden": TOPIC_AUTHORIZATION_FAILED}
        del here.brokers.committed["g"]["t", 0]
        for _ in range(2):
            assert await here.questions.round()
            assert here.behind() == {("g", "hidden"): 7}
        assert "Metadata of hidden is refused to kproxy, TOPIC_AUTHORIZATION_FAILED" in caplog.text

    asking(test)


def test_brokers_that_want_a_login(caplog: pytest.LogCaptureFixture) -> None:
    async def test(here: Asking) -> None:
        here.commit("g", ("t", 0), 3)
        here.brokers.closes_on = {METADATA, FIND_COORDINATOR}
        assert not await here.questions.round()
        assert not await here.questions.round()
        assert here.counted == {("Metadata", "failed"): 2, ("FindCoordinator", "failed"): 2}
        (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "(does it require a login? [cluster.login]). To ask nothing" in line

    asking(test)


def test_brokers_older_than_the_questions(caplog: pytest.LogCaptureFixture) -> None:
    async def test(here: Asking) -> None:
        here.commit("g", ("t", 0), 3)
        assert not await here.questions.round()
        assert {key for key, _ in here.brokers.asked} == {API_VERSIONS}  # an older Metadata creates topics
        assert "no Metadata from version 4 on, which Kafka has since 0.11" in caplog.text

    asking(test, {METADATA: 3, LIST_OFFSETS: 0, OFFSET_FETCH: 1})


def test_groups_beyond_the_limit_of_one_round_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag_questions, "MAX_GROUPS", 2)
    monkeypatch.setattr(lag_questions, "MAX_PARTITIONS", 3)

    async def test(here: Asking) -> None:
        for number in range(5):
            here.commit(f"g{number}", ("t", number), 1)
            here.brokers.committed[f"g{number}"]["t", number] = 2
            here.brokers.ends["t", number] = 10
        for _ in range(3):
            assert await here.questions.round()
        assert here.behind() == {(f"g{number}", "t"): 8 for number in range(5)}

    asking(test)


def test_kproxy_asks_for_nothing_if_no_group_commits() -> None:
    async def test(here: Asking) -> None:
        assert await here.questions.round()
        assert here.brokers.asked == []

    asking(test)


def test_an_unexpected_error_is_logged_and_the_next_round_follows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(here: Asking) -> None:
        here.questions._interval_s = 0.001
        here.commit("g", ("t", 0), 3)
        here.brokers.ends = {("t", 0): 10}
        rounds = 0
        whole_round = here.questions.round

        async def fails_once() -> bool:
            nonlocal rounds
            rounds += 1
            return await whole_round() if rounds > 1 else 1 // 0 > 0

        monkeypatch.setattr(here.questions, "round", fails_once)
        running = asyncio.create_task(here.questions.run())
        while here.behind() != {("g", "t"): 7}:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.005)
        running.cancel()
        assert "a defect of kproxy, asking for lag: ZeroDivisionError" in caplog.text

    asking(test)
