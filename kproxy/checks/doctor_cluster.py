"""Examines one cluster: names, dials, TLS and login, brokers, their versions and ports, loops, advertised addresses.

Every connection uses the cluster's own connector, like those of clients. The bootstrap port and the brokers' ports are
open meanwhile: if kproxy's own request arrives there, that proves a loop. Bounded: MAX_BROKERS brokers are dialled one
by one, IN_PARALLEL at a time, each for connect_timeout_s. Refuses to know how findings are shown.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns

from kproxy.checks.doctor_tls import examine_files, examine_shown
from kproxy.checks.findings import Report
from kproxy.checks.offers import capped, missing, title
from kproxy.errors import UpstreamError
from kproxy.proxy.cluster.port_assignment import PortAssignment
from kproxy.proxy.cluster.ports_file import NotOurs, read
from kproxy.proxy.cluster.questions.question import ask_brokers, ask_versions
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.config.addresses import MAX_PORT, Address
from kproxy.proxy.config.settings import Cluster
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.process.cluster import ClusterProxy
from kproxy.proxy.sockets.listeners import Listener, resolve, why_unbound
from kproxy.proxy.tls.tls_socket import TlsSocket
from kproxy.proxy.upstream.dial_faults import NAME, RESOLVER, TIMEOUT, of_lookup
from kproxy.proxy.upstream.proxy_protocol import UNREAD
from kproxy.proxy.upstream.request import ClosedByBroker
from kproxy.wording import counted, few

MAX_BROKERS = 512
IN_PARALLEL = 32
LISTED = 8
SLOW_NS = 500_000_000
FIRST_BYTES_S = 2.0  # s for the first bytes of an accepted connection
_FIRST_BYTES = 4096

_FIXES = {
    "name": NAME.remedy,
    "timeout": TIMEOUT.remedy,
    "loop": "give the brokers' own addresses: bootstrap and advertised.listeners must not lead to kproxy",
}
_LOGIN_FIX = "check [cluster.login]: mechanism, user name, password or token, and the broker's listener"
_TLS_FIX = "check [cluster.upstream_tls]: ca, certificate, server_name; does the broker's listener speak TLS?"
_CLOSED_FIX = "it may want a certificate of kproxy ([cluster.upstream_tls] certificate), or a login ([cluster.login])"
_OTHER_FIX = "is it a Kafka broker's listener, and of the protocol that is configured (plaintext, TLS, SASL)?"

Say = Callable[[str], None]


def unbound(fault: OSError) -> str:
    """Return what happened to a port that could not be bound; `why_unbound` says what to do."""
    return f"cannot be bound: {fault.strerror or fault}"


class ClusterExamination:
    """The checks of one cluster. Call `listen` for all clusters first, then `run`."""

    def __init__(self, worker: Worker, cluster: Cluster, report: Report, say: Say) -> None:
        self._worker = worker
        self._cluster = cluster
        self._name = f"cluster {cluster.name}"
        self._report = report
        self._say = say
        self._connector = ClusterProxy(worker, cluster).connector
        self._limit = asyncio.Semaphore(IN_PARALLEL)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepted: set[Address] = set()  # peers of connections accepted at our ports
        self._looped: set[Address] = set()  # upstreams whose requests came back
        self._port: int | None = None  # of the bootstrap listener
        self._hosts: Sequence[str] = ()

    # --- ports -------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Bind the bootstrap port, and keep it open during the examination."""
        listen = self._cluster.listen
        try:
            self._hosts = resolve(listen.host)
            self._port = Listener(self._worker.gate, self._hosts, listen.port, 64, self._take, self._name).port
        except OSError as fault:
            fix = why_unbound(fault, self._worker.gate, self._hosts, listen.port)
            self._report.error("ports", f"{self._name}: listen {listen}", unbound(fault), fix)
            return
        self._report.ok("ports", f"{self._name}: listen {listen}", "free")

    def _take(self, client: socket.socket, peer: Address) -> None:
        task = asyncio.get_running_loop().create_task(self._identify(client, peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _identify(self, client: socket.socket, peer: Address) -> None:
        """Check whether a connection accepted at one of our ports is kproxy's own, which proves a loop."""
        self._accepted.add(peer)
        loops = self._worker.loops
        try:
            upstream = loops.is_own(peer, lambda: Address(*client.getsockname()[:2]))
            if upstream is None:
                async with asyncio.timeout(FIRST_BYTES_S):
                    first = await asyncio.get_running_loop().sock_recv(client, _FIRST_BYTES)
                upstream = loops.came_back(first)
            if upstream is not None:
                self._looped.add(upstream)
                loops.refuse(upstream)
        except (OSError, TimeoutError):
            pass  # it sends nothing: not our own request
        finally:
            client.close()

    # --- the examination ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        cluster = self._cluster
        self._say(f"{self._name}: bootstrap {', '.join(map(str, cluster.bootstrap))}")
        examine_files(cluster, self._report)
        answers = await asyncio.gather(*(self._reach("bootstrap", address) for address in cluster.bootstrap))
        reached = [address for address, is_reached in zip(cluster.bootstrap, answers, strict=True) if is_reached]
        brokers = await self._discover(reached)
        for upstream in sorted(self._looped):
            found = f"kproxy's own question to {upstream} arrived at kproxy's own port"
            self._report.error("loops", self._name, found, _FIXES["loop"])
        if brokers is None:
            return
        self._say(f"{self._name}: {counted(len(brokers), 'broker')}")
        await self._examine_brokers(brokers)

    async def _reach(self, kind: str, address: Address) -> bool:
        """Check every address of a name; returns whether a connection could be made."""
        subject = f"{self._name}: {kind} {address}"
        async with self._limit:
            try:
                async with asyncio.timeout(self._worker.dialler.timeout_s):
                    places = await self._worker.dialler.resolver.addresses(address)
            except (OSError, TimeoutError) as fault:
                found = f"cannot be looked up: {getattr(fault, 'strerror', None) or fault or 'no answer'}"
                why = RESOLVER if isinstance(fault, TimeoutError) else of_lookup(fault)
                self._report.error("names", subject, found, why.remedy or NAME.remedy)
                return False
            targets = list(dict.fromkeys(Address(*place[:2]) for _, place in places))
            dials = await asyncio.gather(*(self._dial(target) for target in targets))
            failed = {
                target: dial for target, dial in zip(targets, dials, strict=True) if isinstance(dial, UpstreamError)
            }
            if len(failed) == len(targets):
                refused = next(iter(failed.values()))
                self._report.error("reachability", subject, refused.text, _fix(refused))
                return False
            for target, refused in failed.items():
                found = f"{target}, one of its {len(targets)} addresses: {refused.text}"
                self._report.warn("reachability", subject, found, "clients lose time there: fix it or its DNS entry")
            times = [dial for dial in dials if isinstance(dial, int)]
            if max(times) > SLOW_NS:
                found = f"a connection takes {max(times) / 1e6:.0f} ms"
                self._report.warn("reachability", subject, found, "every new connection of a client waits so long")
            else:
                self._report.ok("reachability", subject, f"connected within {max(times) / 1e6:.1f} ms")
            return True

    async def _dial(self, target: Address) -> int | UpstreamError:
        """Return the nanoseconds until the connection was made, or the fault."""
        start = monotonic_ns()
        try:
            sock = await self._worker.dialler.dial(target, asking=True)
        except UpstreamError as fault:
            return fault
        self._worker.dialler.close(sock)
        return monotonic_ns() - start

    async def _discover(self, reached: Sequence[Address]) -> dict[int, Address] | None:
        """Return node id -> address of all brokers from the bootstrap addresses; None if none answers."""
        found: dict[Address, dict[int, Address]] = {}
        for address, answer in zip(reached, await asyncio.gather(*map(self._ask, reached)), strict=True):
            if answer is not None:
                found[address] = answer
        if not found:
            return None
        first, brokers = next(iter(found.items()))
        for address, others in found.items():
            if others != brokers:
                named = f"{first} names {_listed(brokers.items())}, {address} names {_listed(others.items())}"
                fix = "do these bootstrap addresses belong to one cluster? Then ask again: it may be changing"
                self._report.warn("bootstrap", self._name, named, fix)
        if not brokers:
            self._report.error("bootstrap", self._name, f"{first} names no brokers", "is the cluster up?")
            return None
        self._report.ok("bootstrap", self._name, f"brokers {_listed(brokers.items())}")
        return brokers

    async def _ask(self, address: Address) -> dict[int, Address] | None:
        subject = f"{self._name}: {address}"
        declared = bool(self._cluster.brokers) or self._cluster.route != "ports"
        try:
            async with asyncio.timeout(2 * self._worker.dialler.timeout_s):
                brokers = await ask_brokers(address, self._connector)
        except UpstreamError as fault:
            self._failed(subject, fault)
            return None
        except TimeoutError:
            self._report.error("bootstrap", subject, "it does not answer Metadata in time", _FIXES["timeout"])
            return None
        if brokers is None:
            found = "names its brokers only after a login, and [cluster.login] has none"
            if declared:
                self._report.note("login", subject, found, "nothing: they need not be known beforehand here")
            else:
                fix = "give kproxy a [cluster.login], or declare the node ids in [[cluster.brokers]]"
                self._report.error("login", subject, found, fix)
        elif self._cluster.login is not None:
            self._report.ok("login", subject, f"logged in by {self._cluster.login.mechanism}")
        return brokers

    def _failed(self, subject: str, fault: UpstreamError) -> None:
        """Report a fault of a connection after its dial."""
        if isinstance(fault, ClosedByBroker) and self._cluster.proxy_protocol is not None:
            self._report.error(_check(fault), subject, str(fault), UNREAD)
        elif isinstance(fault, ClosedByBroker) and self._cluster.upstream_tls is not None and _check(fault) != "login":
            # With TLS 1.3 a broker that requires a certificate closes only after the handshake.
            self._report.error("tls", subject, str(fault), _CLOSED_FIX)
        else:
            self._report.error(_check(fault), subject, fault.text, _fix(fault))

    # --- brokers -----------------------------------------------------------------------------------------------------

    async def _examine_brokers(self, brokers: dict[int, Address]) -> None:
        examined = dict(sorted(brokers.items())[:MAX_BROKERS])
        if len(examined) < len(brokers):
            self._report.skip(
                "reachability", self._name, f"{len(brokers) - len(examined)} brokers beyond {MAX_BROKERS}"
            )
        bare = [address for address in examined.values() if address not in self._cluster.bootstrap]
        reached = await asyncio.gather(*(self._reach("broker", address) for address in bare))
        usable = {address for address, is_reached in zip(bare, reached, strict=True) if is_reached}
        usable |= {address for address in examined.values() if address in self._cluster.bootstrap}
        present = {node_id: at for node_id, at in examined.items() if at in usable}
        await self._versions(present)
        if self._cluster.upstream_tls is not None:
            await asyncio.gather(*(self._certificate(node_id, at) for node_id, at in present.items()))
        if self._cluster.route in ("ports", "sni") and self._port is not None:
            routes = Routes(self._cluster, self._port)
            opened = self._broker_ports(routes, brokers) if self._cluster.route == "ports" else set(brokers)
            await self._advertised(routes, {node_id: at for node_id, at in examined.items() if node_id in opened})

    async def _versions(self, brokers: dict[int, Address]) -> None:
        async def ask(node_id: int, address: Address) -> tuple[int, dict[int, tuple[int, int]] | None]:
            async with self._limit:
                try:
                    return node_id, await ask_versions(address, self._connector)
                except UpstreamError as fault:
                    subject = f"{self._name}: broker {node_id} at {address}"
                    self._failed(subject, fault)
                    return node_id, None

        self._say(f"{self._name}: versions of {counted(len(brokers), 'broker')}")
        answers = dict(await asyncio.gather(*(ask(*item) for item in brokers.items())))
        offers = {node_id: answer for node_id, answer in answers.items() if answer is not None}
        if not offers:
            return
        kinds = Counter(tuple(sorted(offer.items())) for offer in offers.values())
        if len(kinds) > 1:
            usual = dict(kinds.most_common(1)[0][0])
            others = [node_id for node_id, offer in offers.items() if offer != usual]
            differing = sorted(
                {
                    key
                    for node_id in others
                    for key in {*offers[node_id], *usual}
                    if offers[node_id].get(key) != usual.get(key)
                }
            )
            found = (
                f"brokers {_listed_ids(others)} serve other versions than the rest: {_listed(map(title, differing))}"
            )
            fix = "expected while the cluster is being upgraded; clients negotiate with each broker for itself"
            self._report.warn("versions", self._name, found, fix)
        lowered = sorted({(key, cap) for offer in offers.values() for key, cap in capped(offer).items()})
        unread = sorted({key for offer in offers.values() for key in missing(offer)})
        if lowered or unread:
            parts = [f"{title(key)} up to v{cap}" for key, cap in lowered] + [f"{title(key)} unread" for key in unread]
            fix = "clients lose nothing but the newest versions: kproxy compat lists them. A newer kproxy reads them"
            self._report.note("versions", self._name, f"brokers are newer than this kproxy: {_listed(parts)}", fix)
        else:
            self._report.ok("versions", self._name, f"kproxy reads all that {len(offers)} broker(s) serve")

    async def _certificate(self, node_id: int, address: Address) -> None:
        async with self._limit:
            try:
                sock, _, _ = await self._connector.open(address, asking=True)
            except UpstreamError:
                return  # reported when its versions were requested
            shown = sock.tls.getpeercert(binary_form=True) if isinstance(sock, TlsSocket) else None
            self._connector.close(sock)
        if shown:
            examine_shown(shown, f"{self._name}: broker {node_id} at {address}", self._report)

    def _broker_ports(self, routes: Routes, brokers: dict[int, Address]) -> set[int]:
        """Open the port of every broker, in addition to the bootstrap port; returns the node ids that have one."""
        free, opened = [], set()
        self._give_ports(routes, brokers)
        for node_id in sorted({*brokers, *routes.declared()}):
            subject = f"{self._name}: broker {node_id}"
            port_of = routes.port_of(node_id)
            if port_of is None:
                if (entry := self._cluster.any_brokers) is not None:
                    found = f"no port is left for it: there are more than {len(entry.ports)} brokers"
                    fix = 'raise port_count of [[cluster.brokers]] ids = "any"'
                elif self._cluster.brokers:
                    found = "its node id is in none of the ranges of [[cluster.brokers]]: its clients get a closed port"
                    fix = f'add a range with it: [[cluster.brokers]] ids = "{node_id}", port = ...'
                else:
                    base = self._cluster.broker_port_base or (self._port or 0) + 1
                    found = f"its node id has no port: {base} + {node_id} is beyond {MAX_PORT}"
                    fix = f'declare it: [[cluster.brokers]] ids = "{node_id}", port = ..., or ids = "any" for all'
                self._report.error("node ids", subject, found, fix)
                continue
            where = Address(self._cluster.listen.host, port_of.bind)
            try:
                Listener(self._worker.gate, self._hosts, port_of.bind, 16, self._take, subject)
            except OSError as fault:
                fix = why_unbound(fault, self._worker.gate, self._hosts, port_of.bind)
                self._report.error("ports", subject, f"{where} {unbound(fault)}", fix)
                continue
            opened.add(node_id)
            free.append(port_of.bind)
        if free:
            self._report.ok("ports", self._name, f"{counted(len(free), 'port')} of brokers free: {_listed(free)}")
        return opened

    def _give_ports(self, routes: Routes, brokers: dict[int, Address]) -> None:
        """Assign ports as a start would, if ids = "any"."""
        entry = self._cluster.any_brokers
        if entry is None:
            return
        assignment = PortAssignment(entry.ports, routes.is_declared)
        if entry.ports_file is not None:
            try:
                assignment.restore(read(entry.ports_file, self._name))
            except (NotOurs, OSError) as fault:
                fix = "remove it, or name another file: ports_file"
                self._report.error("ports", self._name, f"{entry.ports_file} is not used: {fault}", fix)
        assignment.answered(brokers.keys())
        for node_id in sorted(brokers):
            if not routes.is_declared(node_id) and node_id not in assignment.ports:
                assignment.give(node_id, tuple)
        routes.assigned = assignment.ports

    async def _advertised(self, routes: Routes, brokers: dict[int, Address]) -> None:
        """Check whether the advertised addresses lead here, as seen from this host; clients may see otherwise."""
        addresses = {routes.advertised(node_id, at.host): node_id for node_id, at in brokers.items()}
        if len(addresses) < len(brokers):
            found = (
                f"{len(brokers)} brokers, and clients are told only {len(addresses)} addresses: {_listed(addresses)}"
            )
            self._report.error("advertised", self._name, found, "put {port} or {id} into `advertise`")
        await asyncio.gather(*(self._leads_here(address, node_id) for address, node_id in addresses.items()))

    async def _leads_here(self, address: Address, node_id: int) -> None:
        subject = f"{self._name}: broker {node_id} as {address}"
        fix = "clients must be able to resolve and reach it; from this host alone that may differ (NAT, split DNS)"
        dialler = self._worker.dialler
        async with self._limit:
            try:
                async with asyncio.timeout(dialler.timeout_s):
                    places = await dialler.resolver.addresses(address)
            except (OSError, TimeoutError) as fault:
                found = (
                    f"clients are told a name that this host does not know: {getattr(fault, 'strerror', '') or fault}"
                )
                self._report.warn("advertised", subject, found, fix)
                return
            outcomes = [await self._arrives(family, place) for family, place in places[:LISTED]]
        if "here" in outcomes:
            self._report.ok("advertised", subject, "leads here")
        else:
            found = f"it leads elsewhere: {', '.join(sorted(set(outcomes)))}"
            self._report.warn("advertised", subject, found, fix)

    async def _arrives(self, family: socket.AddressFamily, place: tuple[object, ...]) -> str:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                async with asyncio.timeout(min(3.0, self._worker.dialler.timeout_s)):
                    await asyncio.get_running_loop().sock_connect(sock, place)
                    own = Address(*sock.getsockname()[:2])
                    for _ in range(20):
                        if any(peer.port == own.port for peer in self._accepted):
                            return "here"
                        await asyncio.sleep(0.01)
            except (OSError, TimeoutError) as fault:
                return getattr(fault, "strerror", None) or "no answer"
        return "another program answers"


def _listed(items: Iterable[object]) -> str:
    texts = [f"{item[0]}: {item[1]}" if isinstance(item, tuple) and len(item) == 2 else str(item) for item in items]
    return few(texts, LISTED)


def _listed_ids(ids: Iterable[int]) -> str:
    return _listed(sorted(ids))


def _check(fault: UpstreamError) -> str:
    if fault.cause.startswith("login"):
        return "login"
    if fault.cause.startswith("tls") or fault.cause.startswith("certificate"):
        return "tls"
    return "loops" if fault.cause == "loop" else "reachability"


def _fix(fault: UpstreamError) -> str:
    if fault.remedy:
        return fault.remedy
    check = _check(fault)
    if check == "login":
        return _LOGIN_FIX
    return _TLS_FIX if check == "tls" else _FIXES.get(fault.cause, _OTHER_FIX)
