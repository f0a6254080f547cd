"""One client connection with its broker connection, without I/O: the core of the live path and of the offline path.

Duty: compose the two sides, as the owner's only interface. A session cuts frames, pairs responses with requests, reads
the fields of the interest, passes held responses to the owner's transform, and reports all of it as events.

The states of each side. The first word is the handler that takes the side's bytes; a second word is a sub-state, by the
field that is set. `Session.states` returns these names, so that tests can check this table.

    client side                                               broker side
    framed            between two requests                    framed            between two responses
    framed, header    _client_head: an incomplete header      framed, header    _broker_head: an incomplete header
    framed, passing   _client_left: a request in transit      framed, passing   _broker_left: a response in transit
    framed, prefix    _client_prefix: its first fields are    framed, kept      _broker_kept: copied, to be read when
                      incomplete                                                it is complete
    framed, kept      _client_body: its body is copied        framed, held      _held: copied, to be forwarded when it
                                                                                is complete and read
    framed, walking   _client_walker: its body is walked      framed, walking   _broker_walker: its body is walked
    framed, swallowed _client_swallow: kproxy answers it
    framed, owing     too many own responses wait: the next
                      requests wait too (own_answers.py)
    framed, undecided _client_held: not forwarded before
                      the authorizer decides
    framed, deciding  slow: its last request is decided in    framed, editing   slow: its last response is edited in
                      slices, further ones wait (holding.py)                    slices, further ones wait (editing.py)
    await_handshake   SaslHandshake v0 is unanswered          framed, ...
    raw               SASL tokens (raw_sasl.py)               raw
    raw, waiting      _waiting: the last one is unanswered    raw
    blind             forwarded unread after a fault          blind
    closed            after a fatal fault, or the end         closed
    seeking           captures: the next frame is searched    seeking           (captured.py)

`_own_answers` has own responses that wait for older ones; `backlog` has bytes that wait for `resume`.

A peer's bytes never raise: a fault becomes a `Desync`. After it a rewriting session closes, a transparent session
forwards unread, and a session over a capture searches the next plausible frame. The last one also accepts gaps
(`captured.py`).

Limit of work per call, for the sake of other connections: FRAMES_PER_CALL frames, and WALKED_PER_CALL bytes read of
walked bodies (`state.py`). Bytes read of first fields and small bodies count as frames, and compiling a plan counts as
all of a call's frames. Captures have no such limit. A call does one slice of an authorizer's slow work, or none if the
owner does the slices (`slow_work.py`).

Memory, per session: an incomplete header, one prefix (64 KiB) and the usual one (512 bytes), a copy of a small request
whose body is read (64 KiB) or of an undecided one (16 MiB), a copy of a small response (64 KiB) or of a held one
(4 MiB, lists 32 MiB), the backlog (one view per side), LIMIT pending requests, and their topic-partitions (MAX_NAMED,
and MAX_UNCOUNTED of each request). All sessions that share a HeldBudget together hold 64 MiB of undecided requests and
held responses, and 128 MiB of ids and topic-partitions, without the ids and topic-partitions of short requests.
Refuses to know sockets and clocks.
"""

from typing import Any

from kproxy.wire import frames
from kproxy.wire.broker_side import BrokerSide
from kproxy.wire.events import BROKER, CLIENT, SIDES, Closed
from kproxy.wire.reading import Piece
from kproxy.wire.state import FRAMES_WHILE_OTHERS_WAIT, Transform

__all__ = ["Piece", "Session", "Transform"]


class Session(BrokerSide):
    """A reader of a pair of byte streams. `receive`, `resume` and `close` are the whole input.

    `receive` does a bounded amount of work. If unread bytes remain, `backlog[side]` has a view of them. The owner must
    call `resume` until the backlog is None before it passes further bytes of that side: on later turns of its event
    loop, and for the client's side once fewer than pairing.LIMIT requests are pending. The backlog is at most the view
    that was passed to `receive`. Its bytes are neither forwarded nor counted in events before `resume` reads them. A
    call for the broker's side may leave a backlog of the client's side, when the broker answers a SaslHandshake.

    `authorizer` decides requests before any byte of them is forwarded (authorizer.py).

    `transform(exchange, frame)` gets a held response, its 4-byte size included, and returns its replacement, or None to
    forward it; a ProtocolError from it is a fatal Desync.
    """

    __slots__ = ()

    def receive(self, side: int, view: Any, now_ns: int) -> list[Piece]:
        """Take bytes that arrived from a side; return the pieces to send, in order."""
        observers = self.observers
        for observer in observers:
            observer.before(self, side)
        pieces = self._handlers[side](self, view, now_ns)
        if self._needs_finish:
            pieces = self._finish(side, view, pieces, now_ns)
        else:
            self._received[side] += len(view)
        for observer in observers:
            observer.passed(self, side, view, pieces, now_ns)
        return pieces

    def _finish(self, side: int, view: Any, pieces: list[Piece], now_ns: int) -> list[Piece]:
        """Finish a call whose view was not read to its end in one state; return the pieces to send."""
        pieces += self._read_rest(side, now_ns)
        self._received[side] += len(view)
        if self._unread is not None:
            self._received[side] -= self._put_back(side)
        self._frames_left = self._frames_per_call
        self._shift = 0
        self._needs_finish = False
        return pieces

    def limit_next_call(self) -> None:
        """Handle at most FRAMES_WHILE_OTHERS_WAIT frames in the next call, because other connections wait."""
        self._frames_left = FRAMES_WHILE_OTHERS_WAIT
        self._needs_finish = True

    def resume(self, side: int, now_ns: int) -> list[Piece]:
        """Continue with the backlog of a side; return the pieces to send, in order."""
        view, self.backlog[side] = self.backlog[side], None
        return [] if view is None else self.receive(side, view, now_ns)

    def close(self, side: int, now_ns: int, cause: str | None = None) -> None:
        """End a side. The broker's end, or both ends, settle pending requests; both ends emit `Closed`."""
        if side in self._ended:
            return
        self._ended += (side,)
        self._handlers[side] = type(self)._closed
        cause = cause or f"{SIDES[self._ended[0]]}_closed"
        self._take_waiting()
        if side == BROKER or len(self._ended) == 2:
            self._settle(cause)
        if len(self._ended) == 2:
            client, broker = (
                received + len(backlog or b"") for received, backlog in zip(self._received, self.backlog, strict=True)
            )
            login = self.sasl_mechanism, self.sasl_tokens
            self.events.append(Closed(self._ended[0], now_ns, cause, (client, broker), self.software, *login))

    def at_boundary(self, side: int) -> bool:
        """Return whether a side can be closed now: it is between two frames, has no backlog, and owes no token."""
        if self.backlog[side] is not None:
            return False
        if side == CLIENT:
            return not self._client_left and not self._client_head
        if self._handlers[BROKER] is type(self)._broker_tokens and self._raw.replies < self._raw.tokens:
            return False
        return not self._broker_left and not self._broker_head

    @property
    def received_bytes(self) -> tuple[int, int]:
        """Return the bytes read so far from the client and from the broker."""
        client, broker = self._received
        return client, broker

    @property
    def requests(self) -> int:
        """Return the number of requests so far, including pending ones."""
        return self._number

    @property
    def holds_back(self) -> bool:
        """Return whether the client's bytes, and their end, wait for the response to its handshake or token."""
        return bool(self._waiting) and not self._ended

    @property
    def in_transit(self) -> bool:
        """Return whether the client's newest request is incomplete, or is being decided in slices."""
        return bool(self._client_left) or self.slow[CLIENT] is not None

    def missing(self, side: int) -> int:
        """Return the bytes missing from the frame in transit, or from its header; 0 between two frames.

        A drain still reads these bytes.
        """
        left, head = (
            (self._client_left, self._client_head) if side == CLIENT else (self._broker_left, self._broker_head)
        )
        if left or not head:
            return left
        return max(1, (frames.REQUEST_HEAD_BYTES if side == CLIENT else frames.RESPONSE_HEAD_BYTES) - len(head))

    @property
    def states(self) -> tuple[str, str]:
        """Return the states of the client's and of the broker's side, named as in the table of this module."""
        return self._state(CLIENT), self._state(BROKER)

    def _state(self, side: int) -> str:
        name = _STATES[self._handlers[side].__name__]
        if name == "raw" and side == CLIENT and self._waiting is not None:
            return "raw, waiting"
        if name != "framed":
            return name
        if side == CLIENT:
            substates = {
                "undecided": self._client_held is not None,
                "swallowed": self._client_swallow,
                "prefix": self._client_prefix is not None,
                "kept": self._client_body is not None,
                "walking": self._client_walker is not None,
                "passing": bool(self._client_left),
                "header": bool(self._client_head),
            }
        else:
            substates = {
                "walking": self._broker_walker is not None,
                "held": self._broker_kept is not None and self._held,
                "kept": self._broker_kept is not None,
                "passing": bool(self._broker_left),
                "header": bool(self._broker_head),
            }
        return next((f"framed, {substate}" for substate, is_set in substates.items() if is_set), "framed")


_STATES = {
    "_requests": "framed",
    "_answers": "framed",
    "_await_handshake": "await_handshake",
    "_client_tokens": "raw",
    "_broker_tokens": "raw",
    "_blind": "blind",
    "_blind_broker": "blind",
    "_closed": "closed",
    "_owing": "framed, owing",
    "_deciding": "framed, deciding",
    "_editing": "framed, editing",
    "_seek_request": "seeking",
    "_seek_answer": "seeking",
}
