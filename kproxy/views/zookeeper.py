"""ZooKeeper's operations and notifications as text, a line each and its values, and as JSON, one object per line.

Values cannot move the cursor. `zookeeper.operations` has removed secrets from them.
"""

import json
from typing import Any

import click

from kproxy.views import units
from kproxy.views.terminal import printable
from kproxy.wire.connection import ConnectionInfo
from kproxy.zookeeper.records import Values, names_of
from kproxy.zookeeper.session import ANSWERED, Event, Fault, Notification

SHOWN = 300  # characters of a value


def show(event: Event, info: ConnectionInfo | None, *, as_json: bool) -> None:
    """Print an event of a connection. info: None for a single frame."""
    if as_json:
        click.echo(json.dumps(_whose(info) | _object(event), default=_text))
        return
    where = "" if info is None else f"{info.client_address}:{info.client_port}  "
    if isinstance(event, Fault):
        click.echo(f"{_time(event.time)}{where}no frame: {printable(event.text)}, at byte {event.offset}")
    elif isinstance(event, Notification):
        text = f"{event.type} {printable(event.path)}"
        click.echo(f"{_time(event.time)}{where}{_session(event.session)}notification  {text}")
    else:
        line = f"{_time(event.request_start or event.response_start)}{where}{_session(event.session)}"
        line += f"{event.op}  xid {event.xid}"
        if event.error is not None:
            line += f"  zxid {event.zxid}  {_error(event.error)}"
            if event.request_end:
                line += f"  {units.duration(event.response_start - event.request_end)}"
        elif info is not None:
            line += f"  {event.outcome}"
        click.echo(line)
        _show_values("request", event.request)
        if event.outcome == ANSWERED:
            _show_values("answer", event.response)


def show_answer(op: str, values: Values, *, as_json: bool) -> None:
    """Print a response without its request."""
    if as_json:
        click.echo(json.dumps({"op": op, "response": values}, default=_text))
        return
    click.echo(f"answer to {op}  {_error(values.get('err', 0))}")
    _show_values("answer", values)


def _show_values(what: str, values: Values) -> None:
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, default=_text)
        if isinstance(value, bytes):
            text = _text(value)
        cut = text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,} characters)"
        click.echo(f"    {what} {name}: {printable(cut)}")


def _object(event: Event) -> dict[str, Any]:
    if isinstance(event, Fault):
        return {"op": "fault", "time_ns": event.time, "text": event.text, "offset": event.offset}
    session = _session(event.session).strip() or None
    if isinstance(event, Notification):
        fields = {"type": event.type, "state": event.state, "path": event.path, "zxid": event.zxid}
        return {"op": "notification", "time_ns": event.time, "session": session, **fields}
    names = ("xid", "zxid", "number", "request_bytes", "response_bytes", "outcome", "request", "response")
    times = {f"{name}_ns": getattr(event, name) or None for name in ("request_start", "response_start")}
    error = None if event.error is None else names_of("errors").get(event.error, str(event.error))
    rest = {name: getattr(event, name) for name in names}
    return {"op": event.op, "session": session, "error": error, **times, **rest}


def _whose(info: ConnectionInfo | None) -> dict[str, Any]:
    names = ("client_address", "client_port", "broker_address", "broker_port")
    if info is None:
        return {}
    return {"connection": info.id, **{name.replace("broker", "server"): getattr(info, name) for name in names}}


def _session(number: int) -> str:
    return f"0x{number & (1 << 64) - 1:x}  " if number else ""


def _time(time_ns: int) -> str:
    return f"{units.time(time_ns, decimals=6)}  " if time_ns else ""


def _error(number: int) -> str:
    return str(names_of("errors").get(number, number)) if number else "OK"


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")
