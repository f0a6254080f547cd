"""What kproxy asks brokers at an interval: where logs end that groups read, and what groups have committed.

Traffic does not show all of it: consumers stop, other kproxies are beside other brokers, offsets and groups are deleted
elsewhere. So the coordinators of all groups that were seen are asked for their offsets (OffsetFetch), and the leaders
of all partitions with a committed offset for their ends (ListOffsets). Leaders and coordinators are asked for when they
are not known, and again when a broker is no longer the one.

Bounded: MAX_GROUPS groups and MAX_PARTITIONS partitions of a round, which take turns where there are more; one
connection to a broker, one request on it at a time, each in the dialler's timeout. After a round in which no broker
answered the next one comes later, up to MAX_PAUSE_S. What brokers refuse is counted, and logged once. Refuses to know
how lag is computed, and requests' bytes.
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
from kproxy.metrics.cells import ClusterCells
from kproxy.metrics.lag import Lags
from kproxy.metrics.offsets import Key
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
from kproxy.proxy.cluster.offset_questions import (
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
GROUPS_PER_TURN = 10  # whose offsets are taken in before the loop has its turn
PARTITIONS_PER_TURN = 200

_NOT_AUTHORIZED = frozenset((TOPIC_AUTHORIZATION_FAILED, GROUP_AUTHORIZATION_FAILED, CLUSTER_AUTHORIZATION_FAILED))
_FEW = 3  # names in a line of the log

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Ask = Callable[[Conversation, Offers, Iterable[K]], Coroutine[Any, Any, Answer[K, V]]]

log = logging.getLogger("kproxy.lag")


class LagSource(Protocol):
    """Where the offsets of a cluster are kept."""

    async def lags(self, cluster: str) -> Lags | None:
        """What is known now, by all processes; None: nothing reads bodies yet."""

    def learned(self, cluster: str, lags: Lags, since_ns: int) -> None:
        """These have been told what brokers answered since then."""


class OwnLags:
    """Offsets of a kproxy of one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def lags(self, cluster: str) -> Lags | None:
        return self._metrics.cluster(cluster).lags

    def learned(self, cluster: str, lags: Lags, since_ns: int) -> None:
        """Nothing is to be done: these are the ones that a scrape shows."""


class LagQuestions:
    """Asks one cluster for as long as kproxy runs.

    address_of(node id): where a broker is, if it is not where the cluster says. now_ns(): the clock of the events.
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
        self._said: set[str] = set()  # kinds of lines that were logged
        self._limiter = LogLimiter(log)
        cells.asks_for_lag(schema().apis[api_key].name for api_key in APIS)

    async def run(self) -> None:
        """Ask, for ever."""
        pause_s = self._interval_s
        while True:
            await asyncio.sleep(pause_s * random.uniform(0.9, 1.1))
            is_answered = False
            try:
                is_answered = await self.round()
            except Exception as fault:  # a defect here must not end what alerts depend on
                text = (
                    "cluster=%s: a defect of kproxy, asking for lag: %r; it is asked again. Please report these lines"
                )
                self._limiter.log(logging.ERROR, type(fault), text, self._cells.cluster, fault, exc_info=fault)
            pause_s = self._interval_s if is_answered else min(2 * pause_s, max(self._interval_s, MAX_PAUSE_S))

    async def round(self) -> bool:
        """Ask once for everything that there is to ask; whether some broker answered, or none had to."""
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
            self._say("fault", _why(brokers.faults[0]))
        else:
            self._said.discard("fault")
        if brokers.answers:
            self._source.learned(self._cells.cluster, lags, begun_ns)
        return brokers.answers > 0

    # --- who is to be asked ------------------------------------------------------------------------------------------

    def _where(self, node_id: int) -> Address | None:
        return self._address_of(node_id) or self._brokers.get(node_id)

    async def _find_leaders(self, brokers: "_Brokers", topics: Collection[str]) -> None:
        """Ask for the leaders of topics of which none is known."""
        unknown = sorted(topic for topic in topics if topic not in self._leaders)
        answer = await self._asked(brokers, None, METADATA, leaders, unknown)
        if answer is not None:
            self._brokers.update(answer.brokers)
            self._leaders |= answer.found
            hidden = {topic for topic, code in answer.refused.items() if code in _NOT_AUTHORIZED}
            self._listed = (self._listed | answer.found.keys() | answer.refused.keys()) - hidden

    async def _find_coordinators(self, brokers: "_Brokers", groups: Collection[str]) -> None:
        self._coordinators = {group: node for group, node in self._coordinators.items() if group in groups}
        unknown = sorted(group for group in groups if group not in self._coordinators)
        answer = await self._asked(brokers, None, FIND_COORDINATOR, coordinators, unknown)
        if answer is not None:
            self._brokers.update(answer.brokers)
            self._coordinators |= answer.found

    # --- what is asked -----------------------------------------------------------------------------------------------

    async def _ask_groups(self, brokers: "_Brokers", lags: Lags, groups: Collection[str]) -> None:
        await self._find_coordinators(brokers, groups)
        for node_id, some in _by_broker(self._coordinators).items():
            asked_ns = self._now_ns()
            answer = await self._asked(brokers, node_id, OFFSET_FETCH, committed, some)
            for group in some if answer is None else answer.refused:
                self._coordinators.pop(group, None)
            if answer is None:
                continue
            keys = lags.committed_keys()
            await self._find_hidden(brokers, answer.found, keys)
            for number, (group, offsets) in enumerate(answer.found.items()):
                known = keys.get(group, ())
                lags.told_offsets(group, offsets, known, asked_ns, self._is_listed)
                if number % GROUPS_PER_TURN == 0:
                    await asyncio.sleep(0)

    async def _find_hidden(
        self, brokers: "_Brokers", found: Mapping[str, Mapping[Partition, int]], keys: Mapping[str, list[Key]]
    ) -> None:
        """Ask once more which topics may be described, where coordinators left some out: it may have been revoked."""
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
            answer = await self._asked(brokers, node_id, LIST_OFFSETS, ends, partitions)
            leaderless.update(topic for topic, _ in (partitions if answer is None else answer.refused))
            found = iter(answer.found.items() if answer is not None else ())
            while some := dict(islice(found, PARTITIONS_PER_TURN)):
                lags.told_ends(some, asked_ns, self._now_ns())
                await asyncio.sleep(0)
        for topic in leaderless:
            self._leaders.pop(topic, None)

    def _is_listed(self, topic: str) -> bool:
        return topic in self._listed

    async def _asked(
        self,
        brokers: "_Brokers",
        node_id: int | None,
        api_key: int,
        ask: Ask[K, V],
        of: Collection[K],
    ) -> Answer[K, V] | None:
        """Ask a broker, by its node id or, for None, any; count how it went. None: it did not answer."""
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
            self._say(f"{api} {code}", f"{text} passes here. Allow kproxy to Describe topics and groups")
        if not is_denied:
            self._said = {kind for kind in self._said if not kind.startswith(f"{api} ")}
        return answer

    def _some(self, what: str, items: Sequence[K], most: int) -> Sequence[K]:
        """Those whose turn it is, where there are too many for one round."""
        if len(items) <= most:
            return items
        items = sorted(items, key=str)  # the same order in each round
        start = self._turn.get(what, 0) % len(items)
        self._turn[what] = start + most
        return [*items[start:], *items[:start]][:most]

    def _say(self, kind: str, text: str) -> None:
        """Log a line, once until it is no longer so."""
        if kind not in self._said:
            self._said.add(kind)
            log.warning(
                "cluster=%s: %s. To ask nothing: ask_interval_s = 0 in [cluster.lag]", self._cells.cluster, text
            )


class _Brokers:
    """The brokers that are asked in one round: a connection to each, made when it is first needed."""

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
        self._open: dict[int | None, tuple[Conversation, Offers] | None] = {}  # None: it has failed in this round

    async def ask(
        self,
        node_id: int | None,
        ask: Ask[K, V],
        of: Collection[K],
    ) -> Answer[K, V] | None:
        """What a broker answers; None: nothing, now or before in this round."""
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
        """A connection to a broker, or to the first that answers. Raises UpstreamError and ProtocolError."""
        if node_id is not None:
            address = self._where(node_id)
            if address is None:
                raise UpstreamError(f"nobody says where broker {node_id} is", "no_address")
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
        return "a broker does not answer questions for lag in time"
    hint = " (does it want a login? [cluster.login])" if isinstance(fault, ClosedByBroker) else ""
    return f"a broker does not answer questions for lag: {fault}{hint}"


def _topics(lags: Lags) -> set[str]:
    return {topic for _, (topic, _) in lags.committed if isinstance(topic, str)}


def _by_broker(nodes: dict[K, int]) -> dict[int, list[K]]:
    found: defaultdict[int, list[K]] = defaultdict(list)
    for key, node_id in nodes.items():
        found[node_id].append(key)
    return found
