"""The bodies of the admin port's requests and answers: parameters in JSON, lists in slices, gzip.

Duty: from values to bytes and back, in steps between which the relays run. Refuses to know what the values mean.
"""

import asyncio
import json
import re
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web

from kproxy.admin import connections

_NEVER = re.compile(r"\s*q=0(\.0*)?\s*").fullmatch  # the weight of a coding that the client refuses
_THREAD_BYTES = 64 * 1024  # larger answers are compressed on a thread (this size takes 0.4 ms)

Slices = AsyncIterator[Sequence[Any]]


async def read_parameters(request: web.Request) -> dict[str, str]:
    """The parameters in a body: a JSON object of plain values. Raises ValueError, or an HTTP error for the body."""
    try:
        async with asyncio.timeout(connections.REQUEST_S):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {connections.REQUEST_S:g} s\n") from None
    except ConnectionError:  # the client is gone
        raise web.HTTPBadRequest from None
    if not body.strip():
        return {}
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError('the body is not JSON: write parameters as {"name": "value"}, or in the query') from None
    if not isinstance(values, dict) or not all(isinstance(value, str | int | float) for value in values.values()):
        raise ValueError('the body is no object of plain values, like {"name": "value"}')
    return {name: str(value) for name, value in values.items()}


def json_line(value: Any) -> bytes:
    """A line of a stream; an empty line detects a client that is gone."""
    return b"\n" if value is None else json.dumps(value).encode() + b"\n"


async def json_of_slices(slices: Slices) -> str:
    """A JSON list, encoded in slices between which the relays run."""
    parts = []
    async for rows in slices:
        if rows:
            parts.append(json.dumps(rows)[1:-1])
        await asyncio.sleep(0)
    return f"[{', '.join(parts)}]"


async def packed(request: web.Request, body: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    """(the body, compressed if the client accepts gzip; the headers of the answer)

    Not by aiohttp: its fixed level takes four times as long, for a tenth fewer bytes.
    """
    if _takes_gzip(request.headers.get("Accept-Encoding", "")):
        many = len(body) > _THREAD_BYTES
        body = await asyncio.to_thread(_gzip, body) if many else _gzip(body)
        headers = {**headers, "Content-Encoding": "gzip"}
    return body, {"Vary": "Accept-Encoding", **headers}


def _takes_gzip(accepted: str) -> bool:
    """Whether an Accept-Encoding header accepts gzip: with a weight above 0 (RFC 9110, 12.5.3)."""
    return any(
        name.strip() == "gzip" and not _NEVER(weight)
        for name, _, weight in (coding.partition(";") for coding in accepted.lower().split(","))
    )


def _gzip(body: bytes) -> bytes:
    return zlib.compress(body, zlib.Z_BEST_SPEED, wbits=zlib.MAX_WBITS + 16)  # + 16: the format is gzip's
