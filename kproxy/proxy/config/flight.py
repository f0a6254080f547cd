"""Settings of the flight recorder: the table `[flight]`, or only its folder as a text.

Refuses to know the recorder's memory (`kproxy.flight`) and the time of a dump.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from kproxy.proxy.config.model import Frozen

_Trigger = Literal["slow", "error", "disconnect", "findings"]
TRIGGERS: tuple[str, ...] = get_args(_Trigger)
_Severity = Literal["critical", "warning", "note"]
SEVERITIES: tuple[str, ...] = get_args(_Severity)  # the most severe first
_MIB = 1 << 20


def _triggers(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class Flight(Frozen):
    """`[flight]`: the traffic that each relaying process keeps in memory, and when it writes a dump."""

    folder: Path  # each dump gets a folder in it
    minutes: Annotated[float, Field(gt=0, le=1440, allow_inf_nan=False)] = 5.0  # minutes before a dump that it covers
    frame_memory: Annotated[int, Field(ge=_MIB)] = 64 * _MIB  # bytes of frames in memory; the oldest are dropped
    # bytes of rows of exchanges in memory; the oldest are dropped
    header_memory: Annotated[int, Field(ge=_MIB)] = 64 * _MIB
    # events that cause a dump without a request
    triggers: Annotated[tuple[_Trigger, ...], BeforeValidator(_triggers)] = ()
    # trigger slow: seconds after which an answer is slow; the time that a Fetch may wait is left out
    slow_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0
    # trigger findings: least severity of a new finding, looked for once a minute
    findings_severity: _Severity = "critical"
    # least seconds between two dumps that a trigger caused
    pause_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    keep: Annotated[int, Field(ge=1)] = 20  # number of dumps to keep; the oldest are removed
    keep_bytes: Annotated[int, Field(ge=_MIB)] = 1 << 30  # bytes of all dumps together; the oldest are removed
    records: bool = False  # dumps contain keys and values of records; otherwise zeros


def of_folder(value: Any) -> Any:
    """Return a table with defaults for a text, which is the folder; any other value unchanged."""
    return {"folder": value} if isinstance(value, str | Path) else value
