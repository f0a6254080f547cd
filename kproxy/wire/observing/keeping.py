"""The frames of an exchange whose plan keeps them (`ApiPlan.kept`), between the request's first byte and the event.

Duty: keep both `request_frame` and `response_frame` of an answered exchange, or neither (for `Kept.small` APIs only
`response_frame` shows which). The bytes of the request count in the plan's `Kept` until the exchange is emitted.
Refuses to know the contents of a frame.
"""

from typing import Any

from kproxy.wire.events import ANSWERED, NONE, Exchange
from kproxy.wire.observing.kept import FrameInParts, Kept


def keep_request(kept: Kept, exchange: Exchange, frame: Any) -> None:
    """Keep a complete request, including its 4-byte size, until its response."""
    exchange.response_frame = None
    size = len(frame)
    if exchange.plan.api_key in kept.small:
        exchange.request_frame = bytes(frame) if kept.is_small(size) else None
    else:
        exchange.request_frame = bytes(frame) if kept.fits(size) and kept.take(size) else None


def begin_request(kept: Kept, exchange: Exchange, size_bytes: int) -> FrameInParts | None:
    """Begin to keep a request that arrives in parts; None: a frame of that size is not kept."""
    exchange.request_frame = exchange.response_frame = None
    fits = kept.is_small if exchange.plan.api_key in kept.small else kept.fits
    return FrameInParts(kept) if fits(size_bytes) else None


def end_request(kept: Kept, exchange: Exchange, parts: FrameInParts) -> None:
    """Keep the complete request that arrived in parts."""
    frame = parts.take()
    if exchange.outcome is not ANSWERED:
        exchange.request_frame = frame
        if frame is not None and exchange.plan.api_key not in kept.small:
            kept.held_bytes += len(frame)
    elif frame is None:
        exchange.response_frame = None
    elif exchange.response_frame is not None:
        exchange.request_frame = frame


def begin_answer(kept: Kept, exchange: Exchange, size_bytes: int) -> FrameInParts | None:
    """Begin to keep a response that arrives in parts; None: it is not kept."""
    is_of_use = exchange.request_frame is not None or exchange.request_end == NONE
    return FrameInParts(kept) if is_of_use and kept.fits(size_bytes) else None


def keep_answer(kept: Kept, exchange: Exchange, frame: Any) -> None:
    """Keep a complete response, just before its exchange is emitted. frame None: a part of it was not kept."""
    is_early = exchange.request_end == NONE  # a capture may show it before the end of its request
    if not is_early:
        emitted(kept, exchange)
    is_wanted = bool(exchange.errors) or exchange.plan.api_key not in kept.only_failed
    is_wanted = is_wanted and (is_early or exchange.request_frame is not None)
    if is_wanted and frame is not None and kept.fits(len(frame)):
        exchange.response_frame = bytes(frame)
    else:
        exchange.request_frame = None


def emitted(kept: Kept, exchange: Exchange) -> None:
    """Stop counting the request's frame, which belongs to the owner of the event from now on."""
    if exchange.request_frame is not None and exchange.plan.api_key not in kept.small:
        kept.release(len(exchange.request_frame))
