"""The lag monitor's requests to brokers at an interval: ends of consumed logs, and offsets committed by groups.

Traffic does not show all of them: consumers stop, other kproxies relay other brokers, clients elsewhere delete offsets
and groups. kproxy therefore asks the coordinators of all observed groups for committed offsets (OffsetFetch), and the
leaders of all partitions with a committed offset for the ends of their logs (ListOffsets). It looks up leaders and
coordinators if they are unknown, and again if a broker has ceased to be one.

Bounded: MAX_GROUPS groups and MAX_PARTITIONS partitions per round, which take turns if there are more; one connection
per broker, one request on it at a time, each within the dialler's timeout. If no broker answers in a round, the pause
doubles, up to MAX_PAUSE_S. kproxy counts error codes from brokers, and logs each kind once. Refuses to know the
computation of lag and the bytes of requests.
"""

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any, Protocol, TypeVar
from uuid import UUID

from kproxy.errors import ProtocolError, UpstreamError
from kproxy.metrics import Metrics
from kproxy.metrics.consumers.lag import Lags
from kproxy.metrics.consumers.offsets import Key
from kproxy.metrics.counters.cells import ClusterCells
from kproxy.protocol.apis import (
    CLUSTER_AUTHORIZATION_FAILED,
    FIND_COORDINATOR,
    GROUP_AUTHORIZATION_FAILED,
    LIST_OFFSETS,
    METADATA,
    OFFSET_FETCH,
    TOPIC_AUTHORIZATION_FAILED,
)
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.schema import schema
from kproxy.proxy.cluster.bootstrap import BootstrapAddresses
from kproxy.proxy.cluster.questions.offset_questions import (
    APIS,
    Answer,
    Offers,
    Partition,
    committed,
    coordinators,
    ends,
    leaders,
)
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.log_limiter import LogLimiter
from kproxy.proxy.upstream.connector import BrokerConnector
from kproxy.proxy.upstream.conversation import Conversation, conversation
from kproxy.proxy.upstream.request import ClosedByBroker
from kproxy.wording import few

MAX_GROUPS = 2000
MAX_PARTITIONS = 20_000
MAX_PAUSE_S = 300.0
GROUPS_PER_TURN = 10  # groups whose offsets are applied before the event loop continues
PARTITIONS_PER_TURN = 200

_NOT_AUTHORIZED = frozenset((TOPIC_AUTHORIZATION_FAILED, GROUP_AUTHORIZATION_FAILED, CLUSTER_AUTHORIZATION_FAILED))
_FEW = 3  # names per log line

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Ask = Callable[[Conversation, Offers, Iterable[K]], Coroutine[Any, Any, Answer[K, V]]]

log = logging.getLogger("kproxy.lag")


class LagSource(Protocol):
    """Holds the offsets of a cluster."""

    async def lags(self, cluster: str) -> Lags | None:
        """Return the current offsets of all processes; None if nothing decodes bodies yet."""

    def learned(self, cluster: str, lags: Lags, since_ns: int) -> None:
        """Publish `lags`, which include brokers' answers since `since_ns`."""


class OwnLags:
    """The offsets of a kproxy of one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def lags(self, cluster: str) -> Lags | None:
        return self._metrics.cluster(cluster).lags

    def learned(self, cluster: str, lags: Lags, since_ns: int) -> None:
        """Do nothing: a scrape shows these same offsets."""


class LagQuestions:
    """Asks one cluster for as long as kproxy runs.

    address_of(node id): a broker's address that takes precedence over the advertised one. now_ns(): the clock of
    events.
    """

    def __init__(
        self,
        cells: ClusterCells,
        connector: BrokerConnector,
        bootstrap: BootstrapAddresses,
        address_of: Callable[[int], Address | None],
        source: LagSource,
        interval_s: float,
        now_ns: Callable[[], int],
    ) -> None:
        self._cells = cells
        self._connector = connector
        self._bootstrap = bootstrap
        self._address_of = address_of
        self._source = source
        self._interval_s = interval_s
        self._now_ns = now_ns
        self._brokers: dict[int, Address] = {}
        self._leaders: dict[str, dict[int, int]] = {}  # topic -> partition -> node id
        self._coordinators: dict[str, int] = {}  # by group
        self._listed: set[str] = set()  # topics that kproxy may describe, so that coordinators list their offsets
        self._turn: dict[str, int] = {}
        self._logged: set[str] = set()  # kinds of lines that were logged
        self._limiter = LogLimiter(log)
        cells.asks_for_lag(schema().apis[api_key].name for api_key in APIS)

    async def run(self) -> None:
        """Ask for ever."""
        pause_s = self._interval_s
        while True:
            await asyncio.sleep(pause_s * random.uniform(0.9, 1.1))
            is_answered = False
            try:
                is_answered = await self.round()
            except Exception as fault:  # a defect here must not end the requests: alerts depend on them
                text = (
                    "cluster=%s: a defect of kproxy, asking for lag: %r; it is asked again. Please report these lines"
                )
                self._limiter.log(logging.ERROR, type(fault), text, self._cells.cluster, fault, exc_info=fault)
            pause_s = self._interval_s if is_answered else min(2 * pause_s, max(self._interval_s, MAX_PAUSE_S))

    async def round(self) -> bool:
        """Ask once for all offsets; returns whether some broker answered, or no request was needed."""
        lags = await self._source.lags(self._cells.cluster)
        groups = self._some("groups", lags.groups(), MAX_GROUPS) if lags is not None else []
        if lags is None or not groups:
            return True
        begun_ns = self._now_ns()
        async with AsyncExitStack() as stack:
            brokers = _Brokers(self._connector, self._bootstrap, self._where, self._brokers.values, stack)
            topics = _topics(lags)
            self._leaders = {topic: led for topic, led in self._leaders.items() if topic in topics}
            self._listed &= topics
            await self._find_leaders(brokers, topics)
            await self._ask_groups(brokers, lags, groups)
            await self._find_leaders(brokers, _topics(lags) - topics)
            await self._ask_ends(brokers, lags)
        if brokers.faults:
            self._log_once("fault", _why(brokers.faults[0]))
        else:
            self._logged.discard("fault")
        if brokers.answers:
            self._source.learned(self._cells.cluster, lags, begun_ns)
        return brokers.answers > 0

    # --- leaders and coordinators ------------------------------------------------------------------------------------

    def _where(self, node_id: int) -> Address | None:
        return self._address_of(node_id) or self._brokers.get(node_id)

    async def _find_leaders(self, brokers: "_Brokers", topics: Collection[str]) -> None:
        """Ask for the leaders of topics without a known one."""
        unknown = sorted(topic for topic in topics if topic not in self._leaders)
        answer = await self._ask(brokers, None, METADATA, leaders, unknown)
        if answer is not None:
            self._brokers.update(answer.brokers)
            self._leaders |= answer.found
            hidden = {topic for topic, code in answer.refused.items() if code in _NOT_AUTHORIZED}
            self._listed = (self._listed | answer.found.keys() | answer.refused.keys()) - hidden

    async def _find_coordinators(self, brokers: "_Brokers", groups: Collection[str]) -> None:
        self._coordinators = {group: node for group, node in self._coordinators.items() if group in groups}
        unknown = sorted(group for group in groups if group not in self._coordinators)
        answer = await self._ask(brokers, None, FIND_COORDINATOR, coordinators, unknown)
        if answer is not None:
            self._brokers.update(answer.brokers)
            self._coordinators |= answer.found

    # --- offsets -----------------------------------------------------------------------------------------------------

    async def _ask_groups(self, brokers: "_Brokers", lags: Lags, groups: Collection[str]) -> None:
        await self._find_coordinators(brokers, groups)
        for node_id, some in _by_broker(self._coordinators).items():
            asked_ns = self._now_ns()
            answer = await self._ask(brokers, node_id, OFFSET_FETCH, committed, some)
            for group in some if answer is None else answer.refused:
                self._coordinators.pop(group, None)
            if answer is None:
                continue
            keys = lags.committed_keys()
            await self._find_hidden(brokers, answer.found, keys)
            for number, (group, offsets) in enumerate(answer.found.items()):
                known = keys.get(group, ())
                lags.learn_offsets(group, offsets, known, asked_ns, self._is_listed)
                if number % GROUPS_PER_TURN == 0:
                    await asyncio.sleep(0)

    async def _find_hidden(
        self, brokers: "_Brokers", found: Mapping[str, Mapping[Partition, int]], keys: Mapping[str, list[Key]]
    ) -> None:
        """Check again whether topics missing from coordinators' answers may be described: ACLs may have changed."""
        left_out: set[str | UUID | None] = set()
        for group, offsets in found.items():
            left_out |= {topic for topic, _ in keys.get(group, ())} - {topic for topic, _ in offsets}
        in_doubt = [topic for topic in self._listed if topic in left_out]
        for topic in in_doubt:
            self._leaders.pop(topic, None)
            self._listed.discard(topic)
        await self._find_leaders(brokers, in_doubt)

    async def _ask_ends(self, brokers: "_Brokers", lags: Lags) -> None:
        wanted = [
            (topic, number)
            for topic, number in {key: None for _, key in lags.committed}
            if isinstance(topic, str) and topic in self._leaders
        ]
        await asyncio.sleep(0)
        leaderless: set[str] = set()
        led: dict[Partition, int] = {}
        for topic, number in self._some("partitions", wanted, MAX_PARTITIONS):
            node = self._leaders[topic].get(number)
            if node is not None:
                led[topic, number] = node
            else:
                leaderless.add(topic)
        for node_id, partitions in _by_broker(led).items():
            asked_ns = self._now_ns()
            answer = await self._ask(brokers, node_id, LIST_OFFSETS, ends, partitions)
            leaderless.update(topic for topic, _ in (partitions if answer is None else answer.refused))
            found = iter(answer.found.items() if answer is not None else ())
            while some := dict(islice(found, PARTITIONS_PER_TURN)):
                lags.learn_ends(some, asked_ns, self._now_ns())
                await asyncio.sleep(0)
        for topic in leaderless:
            self._leaders.pop(topic, None)

    def _is_listed(self, topic: str) -> bool:
        return topic in self._listed

    async def _ask(
        self,
        brokers: "_Brokers",
        node_id: int | None,
        api_key: int,
        ask: Ask[K, V],
        of: Collection[K],
    ) -> Answer[K, V] | None:
        """Ask a broker and count the outcome; node_id None: any broker. Returns None if it did not answer."""
        if not of:
            return Answer()
        api = schema().apis[api_key].name
        answer = await brokers.ask(node_id, ask, of)
        if answer is None:
            self._cells.lag_questions[api, "failed"] += 1
            return None
        codes = defaultdict(list)
        for key, code in answer.refused.items():
            codes[code].append(key)
        is_denied = bool(codes.keys() & _NOT_AUTHORIZED)
        outcome = "not_authorized" if is_denied else "refused" if codes else "answered"
        self._cells.lag_questions[api, outcome] += answer.requests
        for code in codes.keys() & _NOT_AUTHORIZED:
            text = (
                f"{api} of {few(codes[code], _FEW)} is refused to kproxy, {error_name(code)}: their lag is that of what"
            )
            self._log_once(f"{api} {code}", f"{text} passes here. Allow kproxy to Describe topics and groups")
        if not is_denied:
            self._logged = {kind for kind in self._logged if not kind.startswith(f"{api} ")}
        return answer

    def _some(self, what: str, items: Sequence[K], most: int) -> Sequence[K]:
        """Return the items of this round: all, or the next `most` in turn."""
        if len(items) <= most:
            return items
        items = sorted(items, key=str)  # the same order in each round
        start = self._turn.get(what, 0) % len(items)
        self._turn[what] = start + most
        return [*items[start:], *items[:start]][:most]

    def _log_once(self, kind: str, text: str) -> None:
        """Log a line once, until its kind is removed from `_logged`."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning(
                "cluster=%s: %s. To ask nothing: ask_interval_s = 0 in [cluster.lag]", self._cells.cluster, text
            )


class _Brokers:
    """The brokers asked in one round; each connection is made when it is first needed."""

    def __init__(
        self,
        connector: BrokerConnector,
        bootstrap: BootstrapAddresses,
        where: Callable[[int], Address | None],
        named: Callable[[], Iterable[Address]],
        stack: AsyncExitStack,
    ) -> None:
        self.answers = 0
        self.faults: list[Exception] = []
        self._connector = connector
        self._bootstrap = bootstrap
        self._where = where
        self._named = named
        self._stack = stack
        self._open: dict[int | None, tuple[Conversation, Offers] | None] = {}  # None: it failed in this round

    async def ask(
        self,
        node_id: int | None,
        ask: Ask[K, V],
        of: Collection[K],
    ) -> Answer[K, V] | None:
        """Return a broker's answer; None if it has failed now or earlier in this round."""
        try:
            async with asyncio.timeout(self._connector.dialler.timeout_s):
                if node_id not in self._open:
                    self._open[node_id] = await self._connect(node_id)
                found = self._open[node_id]
                if found is None:
                    return None
                answer = await ask(*found, of)
        except (UpstreamError, ProtocolError, TimeoutError) as fault:
            self._open[node_id] = None
            self.faults.append(fault)
            return None
        self.answers += 1
        return answer

    async def _connect(self, node_id: int | None) -> tuple[Conversation, Offers]:
        """Connect to a broker, or to the first that answers. Raises UpstreamError and ProtocolError."""
        if node_id is not None:
            address = self._where(node_id)
            if address is None:
                raise UpstreamError(f"no answer has the address of broker {node_id}", "no_address")
            return await self._talk(address)
        addresses = list(dict.fromkeys((*self._bootstrap.in_order(), *self._named())))
        for address in addresses[:-1]:
            try:
                return await self._talk(address)
            except UpstreamError:
                self._bootstrap.failed(address)
        return await self._talk(addresses[-1])

    async def _talk(self, address: Address) -> tuple[Conversation, Offers]:
        talk = await self._stack.enter_async_context(conversation(address, self._connector))
        return talk, await talk.versions()


def _why(fault: Exception) -> str:
    if isinstance(fault, TimeoutError):
        return "a broker does not answer requests for lag in time"
    hint = " (does it require a login? [cluster.login])" if isinstance(fault, ClosedByBroker) else ""
    return f"a broker does not answer requests for lag: {fault}{hint}"


def _topics(lags: Lags) -> set[str]:
    return {topic for _, (topic, _) in lags.committed if isinstance(topic, str)}


def _by_broker(nodes: dict[K, int]) -> dict[int, list[K]]:
    found: defaultdict[int, list[K]] = defaultdict(list)
    for key, node_id in nodes.items():
        found[node_id].append(key)
    return found
