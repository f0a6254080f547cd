"""Settings of the flight recorder: `[flight]`, or a folder alone.

Refuses to know what is kept (`kproxy.flight`) and when a dump is made.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kproxy.proxy.config.model import Frozen

TRIGGERS = ("slow", "error", "disconnect")
_MIB = 1 << 20


def _triggers(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class Flight(Frozen):
    """`[flight]`: what is kept in memory, of each process that relays, and when it is written."""

    folder: Path  # each dump gets a folder in it
    minutes: Annotated[float, Field(gt=0, le=1440, allow_inf_nan=False)] = 5.0
    frame_memory: Annotated[int, Field(ge=_MIB)] = 64 * _MIB  # bytes
    header_memory: Annotated[int, Field(ge=_MIB)] = 64 * _MIB
    triggers: Annotated[tuple[Literal["slow", "error", "disconnect"], ...], BeforeValidator(_triggers)] = ()
    slow_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0  # what a Fetch may wait left out
    pause_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0  # between dumps that nobody asked for
    keep: Annotated[int, Field(ge=1)] = 20  # dumps; the oldest go
    keep_bytes: Annotated[int, Field(ge=_MIB)] = 1 << 30
    records: bool = False  # keys and values of records are written, not zeros


def of_folder(value: Any) -> Any:
    """A folder alone stands for a table of defaults."""
    return {"folder": value} if isinstance(value, str | Path) else value
