"""`[[zookeeper]]`: a port for clients of ZooKeeper, and the servers that kproxy relays them to.

Refuses to resolve names and to open anything.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kproxy.proxy.config.addresses import Address, is_wildcard, parse_address
from kproxy.proxy.config.model import Frozen

MAX_SERVERS = 64


def _bound(value: Any) -> Address:
    return value if isinstance(value, Address) else parse_address(str(value), lowest_port=0)


def _server(value: Any) -> Address:
    address = value if isinstance(value, Address) else parse_address(str(value))
    if is_wildcard(address.host):
        raise ValueError(f"{value!r} names no host to dial")
    return address


def _servers(value: Any) -> Any:
    return [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class ZooKeeper(Frozen):
    """`[[zookeeper]]`: kproxy passes the bytes unchanged, counts operations, and records them if `record` is set."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "default"  # the label and the column `cluster`
    listen: Annotated[Address, BeforeValidator(_bound)]  # address that clients of ZooKeeper connect to
    # the servers of the ensemble
    servers: Annotated[
        tuple[Annotated[Address, BeforeValidator(_server)], ...],
        Field(min_length=1, max_length=MAX_SERVERS),
        BeforeValidator(_servers),
    ]


def zookeeper_faults(listeners: Sequence[ZooKeeper], taken: Sequence[Address]) -> Iterator[tuple[str, str]]:
    """(place, fault) between listeners, and with the ports of clusters and admin."""
    ports = list(taken)
    names: set[str] = set()
    for number, each in enumerate(listeners):
        if each.name in names:
            yield f"zookeeper[{number}].name", f"{each.name} is the name of another [[zookeeper]]: name this one"
        names.add(each.name)
        same = [other for other in ports if _meet(each.listen, other)]
        if same:
            yield f"zookeeper[{number}].listen", f"{each.listen} is taken by {same[0]}: take another port"
        ports.append(each.listen)
        if each.listen in each.servers:
            yield f"zookeeper[{number}].servers", f"{each.listen} is this listener itself: name ZooKeeper's servers"


def _meet(one: Address, other: Address) -> bool:
    """Whether two listeners would bind the same port."""
    hosts = one.host == other.host or is_wildcard(one.host) or is_wildcard(other.host)
    return hosts and bool(one.port) and one.port == other.port
