"""One exchange of a capture as text and as JSON: its times, and its frames decoded.

A frame that the capture holds only in part, or that cannot be decoded, is replaced by the reason. Secrets are masked
unless the user asks for them.
"""

from collections.abc import Callable
from typing import Any

import click

from kproxy.convert.frames import Frames
from kproxy.errors import ProtocolError
from kproxy.protocol.schema import api_name
from kproxy.protocol.shown import decode as decoding
from kproxy.protocol.shown.decode import Decoded
from kproxy.views import decode as view
from kproxy.views import units
from kproxy.wire.events import NONE


def show(found: Frames, *, show_secrets: bool, records: int) -> None:
    """Print an exchange: a line about its connection, one about its times, and its frames."""
    info = found.connection
    click.echo(
        f"{api_name(found.api_key)}, request {found.number} of connection {info.id}, "
        f"{info.client_address}:{info.client_port} to {info.broker_address}:{info.broker_port}"
    )
    click.echo(f"{_when(found)}\n")
    for what, frame in _decoded(found):
        if isinstance(frame, Decoded):
            view.show(frame, show_secrets=show_secrets, records=records, topics=found.topics)
        else:
            click.echo(f"{what}: {frame}")


def as_json(found: Frames, *, show_secrets: bool) -> dict[str, Any]:
    """Return the exchange as JSON: times in nanoseconds since the epoch, null if unknown; frames as in `--json`."""
    names = ("request_start", "request_end", "response_start", "response_end")
    times = {f"{name}_ns": getattr(found, name) for name in names}
    sizes = {name: getattr(found, name) for name in ("request_bytes", "response_bytes")}
    frames = {
        what: decoding.as_json(frame, show_secrets=show_secrets) if isinstance(frame, Decoded) else {"error": frame}
        for what, frame in _decoded(found)
    }
    return {
        "connection": found.connection.id,
        "number": found.number,
        "api": api_name(found.api_key),
        "api_version": found.api_version,
        "outcome": found.outcome,
        **{name: None if value == NONE else value for name, value in (times | sizes).items()},
        **frames,
    }


def _when(found: Frames) -> str:
    start, sent, begun, end = found.request_start, found.request_end, found.response_start, found.response_end
    steps = [f"{units.time(start, decimals=6)} UTC"] if start != NONE else []
    if NONE not in (start, sent) and sent > start:
        steps.append(f"sent in {units.duration(sent - start)}")
    if NONE not in (sent, begun):
        steps.append(f"first byte of the answer after {units.duration(begun - sent)}")
    if NONE not in (begun, end) and end > begun:
        steps.append(f"received in {units.duration(end - begun)}")
    return ", ".join([*steps, *([found.outcome] if found.outcome != "answered" else [])])


def _decoded(found: Frames) -> list[tuple[str, Decoded | str]]:
    """Return (name, frame) of request and response; a frame that cannot be shown is the reason as text."""
    frames: list[tuple[str, Decoded | str]] = [("request", _one(found.request, decoding.request))]
    if found.response_start != NONE:
        answer = _one(found.response, lambda frame: decoding.response(frame, found.api_key, found.api_version))
        frames.append(("response", answer))
    return frames


def _one(frame: bytes | None, decode: Callable[[bytes], Decoded]) -> Decoded | str:
    if frame is None:
        return "the capture does not hold all of its bytes"
    try:
        return decode(frame)
    except ProtocolError as fault:
        return f"cannot be decoded: {fault}"
