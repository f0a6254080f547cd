"""Output of `kproxy check`: faults with their places, or a summary of the configuration, in a few lines."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kproxy.checks.filters import Apis, Listed
from kproxy.views.terminal import printable


def faults(found: tuple[tuple[str, str], ...]) -> Iterator[str]:
    """Yield a line for each (place, fault)."""
    for place, text in found:
        yield printable(f"{place}: {text}" if place else text)


def warnings(found: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a line for each (place, probable mistake, fix)."""
    for place, text, fix in found:
        yield printable(f"warning: {place}: {text}: {fix}")


def runs(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a summary: clusters, ZooKeeper listeners, admin port, drain, recording."""
    for cluster in summary["clusters"]:
        yield printable(f"cluster {cluster['name']}")
        for name, text in _cluster(cluster):
            yield printable(f"  {name:<15} {text}")
    for each in summary["zookeeper"]:
        yield printable(f"zookeeper {each['name']}")
        yield printable(f"  {'listens at':<15} {each['listen']}")
        yield printable(f"  {'servers at':<15} {', '.join(each['servers'])}")
    yield printable(f"admin             {summary['admin'] or 'none: no /metrics, /health, /ready'}")
    drain = summary["drain"]
    yield f"drain             {drain['delay_s']:g} s of delay, then at most {drain['timeout_s']:g} s"
    for name in ("record", "flight", "audit"):
        if summary[name]:
            yield printable(f"{name:<17} {summary[name]}")


def filters(cluster: str, chain: Sequence[Listed], free: Apis, width: int = 120) -> Iterator[str]:
    """Yield the lines of a cluster's filters in their order. free: APIs that none of them decides or changes."""
    yield printable(f"cluster {cluster}: a request passes these filters from top to bottom, and so does its answer")
    for number, each in enumerate(chain, 1):
        yield f"  {number}  {each.name:<11} {each.does}"
        if each.requests == each.answers:
            sides = [("both", each.requests)]
        else:
            sides = [("requests", each.requests), ("answers", each.answers)]
        for side, apis in sides:
            if apis.names:
                yield from _wrapped(f"{'':<17}{side:<9}", _names(apis), width)
    yield from _wrapped("  No filter decides or changes: ", _names(free), width)


def _names(apis: Apis) -> str:
    if not apis.others:
        return "all APIs"
    if len(apis.names) > len(apis.others):
        return f"all APIs but {', '.join(apis.others)}"
    return ", ".join(apis.names) or "no API"


def _wrapped(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False)


def _cluster(cluster: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "listens at", f"{cluster['listen']} (route {cluster['route']})"
    yield "broker ports", ", ".join(cluster["broker_ports"])
    yield "clients dial", cluster["advertise"]
    yield "brokers at", ", ".join(cluster["bootstrap"])
    tls, upstream = cluster["tls"], cluster["upstream_tls"]
    yield "client TLS", f"{tls['certificate']}, client certificates {tls['client_certificates']}" if tls else "no"
    verifies = "" if not upstream or upstream["verify_hostname"] else ", host names NOT verified"
    yield "broker TLS", f"CA {upstream['ca']}{verifies}" if upstream else "no"
    authentication = cluster["authentication"]
    passed = "none at the brokers" if authentication else "passed through, if clients log in"
    yield "login", f"{cluster['login']} by kproxy" if cluster["login"] else passed
    yield "authentication", ", ".join(authentication) if authentication else "by the brokers"
    policy = cluster["policy"]
    if policy is None:
        yield "policy", "none: everything passes"
    else:
        count = "1 rule" if policy["rules"] == 1 else f"{policy['rules']} rules"
        rest = {"allow": "allowed", "deny": "denied"}[policy["default"]]
        only = "read-only, " if policy["read_only"] else ""
        yield "policy", f"{only}{count}, what none matches is {rest}"
    if cluster["limits"]:
        yield "limits", ", ".join(f"{name} {value}" for name, value in cluster["limits"].items())
