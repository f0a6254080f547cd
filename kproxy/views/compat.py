"""Output of `kproxy compat` as text, within 80 columns."""

from collections.abc import Iterator
from textwrap import wrap

from kproxy import __version__
from kproxy.checks.compat import Compatibility, Loss
from kproxy.views.terminal import printable
from kproxy.wording import few

WIDTH = 80
LISTED = 20

_HOW = {
    "rewritten": "brokers' addresses become kproxy's",
    "passed": "byte for byte",
    "capped": "the newest versions are not offered",
    "hidden": "not offered: kproxy could not rewrite it",
    "unread": "byte for byte; unknown to this kproxy",
}


def lines(found: Compatibility) -> Iterator[str]:
    """Yield the lines of one cluster: the verdict first, then one line per API."""
    yield from _wrapped(_verdict(found))
    answered = [one for one in found.brokers if one.offers is not None]
    line = ".".join((found.release or "").split(".")[:2])
    serve = f", which serve what Kafka {line} serves" if line else ""
    yield from _wrapped(f"cluster {found.cluster}: {len(answered)} broker(s){serve}; kproxy {__version__}")
    for broker in found.brokers:
        if broker.fault:
            yield from _wrapped(f"not asked: broker {broker.node_id} at {broker.address}: {broker.fault}")
    if found.differing:
        yield from _wrapped(
            f"brokers differ (a rolling upgrade?) in {_some(found.differing)}: ranges are of all together"
        )
    if found.losses:
        yield ""
        for loss in found.losses[:LISTED]:
            yield from _wrapped(_loss(loss))
        if len(found.losses) > LISTED:
            yield f"and {len(found.losses) - LISTED} more: --json lists all"
    if found.unknown:
        yield from _wrapped(f"versions of these clients are unknown; they use the offered ones: {_some(found.unknown)}")
    yield ""
    yield f"{'API':<28} {'brokers':>8} {'kproxy':>7} {'clients':>8}  what kproxy does"
    for one in found.apis:
        ranges = [_range(one.brokers), _range(one.kproxy), _range(one.offered)]
        how = one.treatment if one.treatment in ("rewritten", "passed") else f"{one.treatment}: {_HOW[one.treatment]}"
        yield f"{one.name[:28]:<28} {ranges[0]:>8} {ranges[1]:>7} {ranges[2]:>8}  {how}"[:WIDTH].rstrip()


def _verdict(found: Compatibility) -> str:
    if not found.lost and not found.losses:
        seen = f", the {found.clients} kinds of clients seen too" if found.clients else ""
        return f"Nothing is lost: clients get every API and version that the brokers serve{seen}."
    lost = [f"{one.name} above v{one.offered[1]}" if one.offered else one.name for one in found.lost]
    text = f"Clients do not get {_some(lost)}: this kproxy is older than the brokers; a newer one reads them."
    if found.clients and not found.losses:
        text += f" None of the {found.clients} kinds of clients seen would use it."
    return text


def _loss(loss: Loss) -> str:
    who = printable(
        " ".join(part for part in (loss.client.name, loss.client.software, loss.client.software_version) if part)
    )
    gets = f"gets v{loss.gets}" if loss.gets is not None else "does not get it"
    return f"{who or 'a client'}: {loss.api}: could use v{loss.knows}, {gets}"


def _range(versions: tuple[int, int] | None) -> str:
    if versions is None:
        return "-"
    return f"{versions[0]}-{versions[1]}" if versions[0] != versions[1] else str(versions[0])


def _some(items: tuple[str, ...] | list[str]) -> str:
    return printable(few(items, 8))


def _wrapped(text: str) -> list[str]:
    return wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)
