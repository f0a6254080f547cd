"""The welcome step that checks a client's login before it gets a relay.

Before the login, kproxy answers ApiVersions with the versions of the client's broker that kproxy can read, and with its
own SASL versions: it asks the broker on a connection without a login, and caches the answer for VERSIONS_S.
Unauthenticated clients therefore cause at most one request per broker and version in that time. Bounds: MAX_FRAME of a
frame, MAX_HELD_TOGETHER of incomplete frames of all clients, MAX_REMEMBERED answers. If a frame does not fit, kproxy
drops the frame that has been incomplete for longest, and for at least a second. Refuses to know mechanisms.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from struct import Struct

from kproxy.errors import ProtocolError, RefusedClient, UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE, UNSUPPORTED_VERSION
from kproxy.protocol.codec import Body
from kproxy.protocol.schema import schema
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.filters.rewrite import add_offers
from kproxy.proxy.filters.telemetry import TELEMETRY_APIS
from kproxy.proxy.relay.ends import Incoming
from kproxy.proxy.sasl.clients import MAX_FRAME, Authenticator
from kproxy.proxy.sockets.streams import receive_exactly, send_all
from kproxy.proxy.upstream.connector import BrokerConnector
from kproxy.proxy.upstream.request import ask
from kproxy.wire import frames
from kproxy.wire.decisions.own_answers import unsupported_api_versions
from kproxy.wire.interest import HeldBudget

VERSIONS_S = 30.0
MAX_REMEMBERED = 256
MAX_HELD_TOGETHER = 16 * 1024 * 1024
SMALL_FRAME = 4096  # smaller frames are not counted

_SIZE = Struct(">i")

log = logging.getLogger("kproxy.logins")


class Authentication:
    """upstreams(client): the addresses of its broker. admits(first bytes): False for one of kproxy's own requests.

    capped(version, answer, host, client id): an answer to ApiVersions without versions that no client may use.
    takes_telemetry: answers to ApiVersions offer the APIs with which clients push metrics.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        versions: "BrokerVersions",
        upstreams: Callable[[Incoming], list[Address]],
        admits: Callable[[bytes], bool],
        capped: Callable[[int, memoryview, str, str | None], bytes | None],
        *,
        takes_telemetry: bool = False,
    ) -> None:
        self._authenticator = authenticator
        self._versions = versions
        self._upstreams = upstreams
        self._admits = admits
        self.capped = capped
        self.takes_telemetry = takes_telemetry
        self._held = HeldBudget(MAX_HELD_TOGETHER)
        self._held.give_up = self._give_up

    async def __call__(self, client: Incoming) -> None:
        """Set the client's principal; a step of the admission. Raises RefusedClient, UpstreamError, OSError."""
        session = await self._authenticator.authenticate(_Conversation(self, client))
        client.principal = f"User:{session.known.name}"
        client.session = session
        log.debug("client=%s has logged in as %s by %s", client.peer, client.principal, session.mechanism)

    async def versions(self, client: Incoming, version: int) -> Body:
        fault = UpstreamError("no answer has named its address yet", "no_address")
        for address in self._upstreams(client):
            try:
                return await self._versions.of(address, version)
            except UpstreamError as refused:
                fault = refused
        raise fault

    async def read(self, client: Incoming, *, first: bool) -> bytes:
        head = await receive_exactly(client.sock, 4)
        (size,) = _SIZE.unpack(head)
        if not 0 <= size <= MAX_FRAME:
            kind, text = frames.sniff(head + b"\0\0\0\0")
            raise RefusedClient("authentication", f"{text} ({kind}, before its login)", "malformed")
        frame = await (receive_exactly(client.sock, size) if size <= SMALL_FRAME else self._large(client, size))
        if first and not self._admits(head + frame):
            raise RefusedClient("loop", "it is kproxy's own request, which came back")
        return frame

    async def _large(self, client: Incoming, size: int) -> bytes:
        """Return a frame that is counted until it is complete."""
        patience = asyncio.timeout(None)
        large = _Large(size, patience)
        now_ns = time.monotonic_ns()
        if not self._held.take(size, now_ns, large):
            raise RefusedClient("authentication", "too many clients send large requests before their logins", "no_room")
        self._held.begin(large, now_ns)
        try:
            async with patience:
                return await receive_exactly(client.sock, size)
        except TimeoutError:
            if not patience.expired():
                raise
            text = "it did not go on with a large request before its login, and others waited for the room"
            raise RefusedClient("authentication", text, "no_room") from None
        finally:
            self._held.end(large)
            self._held.release(large.counted)

    def _give_up(self, large: "_Large") -> None:
        self._held.release(large.counted)
        large.counted = 0
        large.patience.reschedule(asyncio.get_running_loop().time())


class _Large:
    """A frame that is being read: the bytes reserved for it, and the timeout that ends the read."""

    def __init__(self, counted: int, patience: asyncio.Timeout) -> None:
        self.counted = counted
        self.patience = patience


class _Conversation:
    def __init__(self, owner: Authentication, client: Incoming) -> None:
        self._owner = owner
        self._client = client
        self._is_first = True
        self._request = b""  # the last request
        self.host = client.peer.host

    async def receive(self) -> bytes:
        is_first, self._is_first = self._is_first, False
        self._request = await self._owner.read(self._client, first=is_first)
        return self._request

    async def send(self, frame: bytes) -> None:
        await send_all(self._client.sock, _SIZE.pack(len(frame)) + frame)

    async def versions(self, version: int, correlation_id: int) -> bytes:
        if version not in schema().apis[API_VERSIONS].request.versions:
            return unsupported_api_versions(correlation_id).frame[4:]
        body = await self._owner.versions(self._client, version)
        if body["errorCode"] == UNSUPPORTED_VERSION:
            version = 0  # brokers report this in version 0 (KIP-511)
        frame = codec.encode_response(API_VERSIONS, version, {"correlationId": correlation_id}, body)
        sized = _SIZE.pack(len(frame)) + frame
        asked, _ = codec.decode_flat_request(self._request)
        sized = self._owner.capped(version, memoryview(sized), self.host, asked.get("clientId")) or sized
        if self._owner.takes_telemetry:
            offered, self._client.broker_takes_telemetry = add_offers(version, memoryview(sized), TELEMETRY_APIS)
            sized = offered or sized
        return sized[4:]


class BrokerVersions:
    """Brokers' answers to ApiVersions without a login, cached for VERSIONS_S; one request for each at a time."""

    def __init__(self, connector: BrokerConnector) -> None:
        self._connector = connector
        self._answers: dict[tuple[Address, int], tuple[float, asyncio.Task[Body]]] = {}

    async def of(self, address: Address, version: int) -> Body:
        """Return the answer's body in that version, with kproxy's own SASL versions. Raises UpstreamError."""
        key = (address, version)
        now = time.monotonic()
        asked_at, task = self._answers.get(key, (0.0, None))
        if task is None or (task.done() and (now - asked_at > VERSIONS_S or task.exception() is not None)):
            if len(self._answers) >= MAX_REMEMBERED:
                self._answers.clear()
            task = asyncio.get_running_loop().create_task(self._ask(address, version))
            self._answers[key] = (now, task)
        return await asyncio.shield(task)

    async def _ask(self, address: Address, version: int) -> Body:
        timeout_s = self._connector.dialler.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                sock, _, _ = await self._connector.open(address)
                try:
                    log.debug("asking for versions, connected to %s from %s", address, Address(*sock.getsockname()[:2]))
                    name = {"clientSoftwareName": "kproxy", "clientSoftwareVersion": "1"} if version >= 3 else {}
                    body = await ask(sock, address, API_VERSIONS, version, name, client_id="kproxy")
                finally:
                    self._connector.close(sock)
        except TimeoutError:
            raise UpstreamError(f"{address} did not answer ApiVersions within {timeout_s:g} s", "timeout") from None
        except ProtocolError as fault:
            raise UpstreamError(f"{address} does not answer ApiVersions as a broker does: {fault}") from None
        return _with_own_sasl(body)


def _with_own_sasl(body: Body) -> Body:
    """Return the answer with the SASL versions of kproxy, which checks logins, in place of the broker's."""
    if body["errorCode"]:
        return body
    offers = [offer for offer in body["apiKeys"] if offer["apiKey"] not in (SASL_HANDSHAKE, SASL_AUTHENTICATE)]
    for key in (SASL_HANDSHAKE, SASL_AUTHENTICATE):
        versions = schema().apis[key].request.versions
        offers.append({"apiKey": key, "minVersion": versions[0], "maxVersion": versions[-1]})
    return {**body, "apiKeys": sorted(offers, key=lambda offer: int(offer["apiKey"]))}
