"""A trace as a stream of JSON lines: collects frames from all processes, and decodes them on a thread.

A trace ends after a time, a number of frames, or a number of bytes: MAX_SECONDS, MAX_FRAMES and MAX_BYTES at most.
Refuses to know relays and the number of processes: `operate` runs an operation in each of them.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from operator import itemgetter
from time import monotonic
from typing import Any

from kproxy.admin.parameters import needed_number, number
from kproxy.proxy.connection.operating import shown

MAX_SECONDS = 3600
MAX_FRAMES = 1_000_000
MAX_BYTES = 1 << 30  # of frames, as on the wire
SECONDS, FRAMES, BYTES = 60, 1000, 16 * 1024 * 1024  # defaults
_POLL_S = 0.1
_TIME = 0  # the index in a frame, which may be a plain tuple. The sort is stable: frames of one time keep their order
_BATCH = 32  # frames decoded in one call

Operate = Callable[..., Awaitable[list[Any]]]


async def follow(query: Mapping[str, str], operate: Operate) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the traced connections, each frame, and the reason of the end; None while there is no frame.

    query: connection=NUMBER or client=ADDRESS; seconds, frames, bytes. Raises ValueError for other parameters.
    """
    unknown = query.keys() - {"connection", "client", "seconds", "frames", "bytes"}
    if unknown or ("connection" in query) == ("client" in query):
        raise ValueError("say what is traced: connection=NUMBER or client=ADDRESS; and seconds=, frames=, bytes=")
    connection = needed_number(query, "connection") if "connection" in query else None
    end = monotonic() + number(query, "seconds", SECONDS, MAX_SECONDS)
    frames_left = number(query, "frames", FRAMES, MAX_FRAMES)
    bytes_left = number(query, "bytes", BYTES, MAX_BYTES)
    name = secrets.token_hex(8)
    try:
        watched = sum(await operate("trace_start", name, connection, query.get("client")))
        if connection is not None and not watched:
            raise ValueError(f"connection={connection} is not open: `kproxy ctl connections` lists those that are")
        yield {"tracing": connection if connection is not None else query.get("client"), "connections": watched}
        why, left_out = "", 0
        while not why:
            await asyncio.sleep(_POLL_S)
            takes = await operate("trace_take", name)
            captured = sorted((frame for taken, _, _ in takes for frame in taken), key=itemgetter(_TIME))
            left_out = sum(dropped for _, dropped, _ in takes)
            for start in range(0, len(captured), _BATCH):
                batch = captured[start : start + _BATCH]
                for line in await asyncio.to_thread(_shown, batch):
                    yield line
                    frames_left -= 1
                    bytes_left -= line["bytes"]
                    if frames_left <= 0 or bytes_left <= 0:
                        why = "its number of frames is reached" if frames_left <= 0 else "its bytes are reached"
                        break
                if why:
                    break
            if not why and monotonic() >= end:
                why = "its time is over"
            elif not why and connection is not None and not any(watched for _, _, watched in takes):
                why = "the connection has ended"
            elif not captured:
                yield None
        yield {"ended": why, "left_out": left_out}
    finally:
        await operate("trace_stop", name)


def _shown(batch: list[Any]) -> list[dict[str, Any]]:
    return [shown(one) for one in batch]
