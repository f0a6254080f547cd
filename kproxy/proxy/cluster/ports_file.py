"""The file that preserves the assignment of ports to node ids over a restart: `ports_file` of [[cluster.brokers]].

A JSON object that identifies its owner:

    {"kproxy": "broker ports", "version": 1, "cluster": "default",
     "ports": {"1840211337": 9201}, "absent_since": {}}

`absent_since` has seconds since the Unix epoch. The file is replaced atomically, and only its owner may read it. A file
with any other content is never overwritten. Bounded by MAX_BYTES. Refuses to know why a broker has a port.
"""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kproxy.proxy.cluster.port_assignment import Held
from kproxy.proxy.config.addresses import MAX_PORT
from kproxy.proxy.config.files import open_regular

MAX_BYTES = 1 << 20  # 4096 ids take 200 KB
MAX_NODE_ID = (1 << 31) - 1
_KIND = "broker ports"
_VERSION = 1


class NotOurs(ValueError):
    """The file is damaged, belongs to another cluster or process, or is not kproxy's at all."""


def read(path: Path, cluster: str) -> dict[int, Held]:
    """Return the ports in the file; none if there is no file. Raises NotOurs, OSError."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(data) > MAX_BYTES:
        raise NotOurs(f"it has more than {MAX_BYTES} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as fault:
        raise NotOurs(f"it is no JSON: {fault}") from None
    if not isinstance(content, dict) or content.get("kproxy") != _KIND:
        raise NotOurs("kproxy has not written it")
    if content.get("version") != _VERSION:
        raise NotOurs(f"its version is {content.get('version')!r}, and this kproxy reads {_VERSION}")
    if content.get("cluster") != cluster:
        raise NotOurs(f"it has the ports of cluster {content.get('cluster')!r}")
    ports = _numbers(content, "ports", MAX_PORT)
    if len(set(ports.values())) < len(ports):
        raise NotOurs("it has a port for two node ids")
    now = time.time()
    absent = _numbers(content, "absent_since", 1 << 40)
    return {
        node_id: Held(port, max(0.0, now - absent[node_id]) if node_id in absent else None)
        for node_id, port in ports.items()
    }


def write(path: Path, cluster: str, held: Mapping[int, Held], kept: Mapping[int, int] | None = None) -> None:
    """Replace or create the file. Raises NotOurs if the existing one is not this cluster's, OSError.

    kept: the ports by node id that this process last read or wrote; other content is from another process.
    """
    path = Path(os.path.realpath(path))  # replaces a link's target
    there = {node_id: each.port for node_id, each in read(path, cluster).items()}
    given = {node_id: each.port for node_id, each in held.items()}
    if kept is not None and there and there not in (kept, given):
        raise NotOurs("another process has changed it; each kproxy needs a file of its own")
    now = time.time()
    content = {
        "kproxy": _KIND,
        "version": _VERSION,
        "cluster": cluster,
        "ports": {str(node_id): each.port for node_id, each in sorted(held.items())},
        "absent_since": {
            str(node_id): int(now - each.absent_s) for node_id, each in held.items() if each.absent_s is not None
        },
    }
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(json.dumps(content) + "\n")
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise


def _numbers(content: Mapping[str, Any], name: str, highest: int) -> dict[int, int]:
    table = content.get(name)
    if not isinstance(table, dict):
        raise NotOurs(f"{name!r} is missing")
    numbers: dict[int, int] = {}
    for key, value in table.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_NODE_ID
        if not is_id or not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= highest:
            raise NotOurs(f"{name!r} has {key[:32]!r}: {str(value)[:32]}")
        numbers[int(key)] = value
    return numbers
