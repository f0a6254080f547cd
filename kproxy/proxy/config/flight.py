"""Settings of the flight recorder: `[flight]`, or a folder alone.

Refuses to know what is kept (`kproxy.flight`) and when a dump is made.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from kproxy.proxy.config.model import Frozen

_Trigger = Literal["slow", "error", "disconnect", "findings"]
TRIGGERS: tuple[str, ...] = get_args(_Trigger)
_Severity = Literal["critical", "warning", "note"]
SEVERITIES: tuple[str, ...] = get_args(_Severity)  # the gravest first
_MIB = 1 << 20


def _triggers(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class Flight(Frozen):
    """`[flight]`: what is kept in memory, of each process that relays, and when it is written."""

    folder: Path  # each dump gets a folder in it
    minutes: Annotated[float, Field(gt=0, le=1440, allow_inf_nan=False)] = 5.0  # how far back a dump reaches
    frame_memory: Annotated[int, Field(ge=_MIB)] = 64 * _MIB  # bytes of frames in memory; the oldest go
    header_memory: Annotated[int, Field(ge=_MIB)] = 64 * _MIB  # bytes of rows of exchanges in memory; the oldest go
    # what makes a dump without being asked
    triggers: Annotated[tuple[_Trigger, ...], BeforeValidator(_triggers)] = ()
    # trigger slow: an answer that takes longer; the time that a Fetch may wait is left out
    slow_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    # trigger findings: what is found once a minute and was not there a minute before, from this severity on
    findings_severity: _Severity = "critical"
    # least time between two dumps that nobody asked for
    pause_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    keep: Annotated[int, Field(ge=1)] = 20  # dumps that stay; the oldest are removed
    keep_bytes: Annotated[int, Field(ge=_MIB)] = 1 << 30  # bytes of all dumps together; the oldest are removed
    records: bool = False  # keys and values of records are written; otherwise zeros


def of_folder(value: Any) -> Any:
    """A folder alone stands for a table of defaults."""
    return {"folder": value} if isinstance(value, str | Path) else value
