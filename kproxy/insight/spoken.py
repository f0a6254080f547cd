"""What insight is fed: a request and its answer, decoded, with whose they are and when they came.

Whoever feeds it decides what is decoded, and gives it in the order of answers. Refuses to know sockets and captures.
"""

from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]


@dataclass(slots=True, eq=False)
class Spoken:
    """One exchange. Bodies are as `protocol.codec` decodes them; times are nanoseconds since the epoch."""

    api_key: int
    api_version: int
    request: Body
    response: Body | None  # None: it was never answered
    request_end: int
    response_start: int
    cluster: str = "default"
    client_id: str | None = None
    client_address: str | None = None
    broker_id: int | None = None
    connection: int | None = None
    number: int | None = None
