"""What became of captures that were turned into tables, in plain words.

Duty: the terminal side only: the quality of each capture, what its exchanges say at first sight, the rows written, and
the next command to type. Complaints go to standard error. Nothing is counted here.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from kproxy.analysis.overview import Api, Overview
from kproxy.capture.quality import Quality
from kproxy.convert.job import Summary
from kproxy.tables.dataset import read_manifest
from kproxy.views import units
from kproxy.views.terminal import printable

TOPICS_SHOWN = 20
APIS_SHOWN = 8
NAMES_SHOWN = 4


def show(summary: Summary, found: Overview | None = None, *, strict: bool = False) -> int:
    """Show what was done; returns how many complaints there are.

    A complaint is a capture that failed, no Kafka in any, and with `strict` a capture whose tables are not complete.
    """
    for source, quality in summary.quality.items():
        _say(printable(source))
        _table([(f"{row.count:,}", units.size(row.bytes) if row.bytes else "", row.sentence) for row in quality], ">><")
        _say(verdict(quality, summary.key_log), "")
    if found is not None and found.exchanges:
        _show_overview(found)
    for name, rows in sorted(summary.rows.items()) if summary.quality else ():
        _say(printable(f"{rows:>12,} rows  {summary.folder / name}"))
    if found is not None and summary.quality:
        others = [
            source for source in read_manifest(summary.folder).get("sources", ()) if source not in summary.quality
        ]
        if others:
            more = f" and {len(others) - NAMES_SHOWN} more captures" if len(others) > NAMES_SHOWN else ""
            _say(printable(f"{summary.folder} also holds {', '.join(sorted(others)[:NAMES_SHOWN])}{more}"))
    if summary.chosen is not None and not summary.rows.get("records"):
        _say(printable(_no_records(summary.chosen.topics, summary.topics)))
    complaints = [printable(str(fault)) for fault in summary.failed]
    if summary.quality and not (summary.found_kafka or summary.found_zookeeper):
        complaints.append("no Kafka was found: the tables have no exchanges")
    elif strict:
        complaints += [
            f"{printable(source)} is not complete (--strict)"
            for source, quality in summary.quality.items()
            if losses(quality, summary.key_log)
        ]
    for complaint in complaints:
        click.echo(f"kproxy: {complaint}", err=True)
    return len(complaints)


def show_next(found: Overview, folder: Path, captures: dict[str, Sequence[str]], options: Sequence[str]) -> None:
    """The commands that go on from here. captures: the files of each source; options: those that ids depend on."""
    if not (found.exchanges or found.groups):
        return
    _say("", "Next:")
    slow = found.slowest[0] if found.slowest else None
    if slow is not None and "-" not in captures[slow.source]:  # standard input cannot be read again
        rotated = ["--rotated"] if len(captures[slow.source]) > 1 else []
        decode = ["kproxy", "decode", "--exchange", f"{slow.connection}:{slow.number}", *options, *rotated]
        _say(f"  {shlex.join([*decode, *captures[slow.source]])}")
    jobs = ["overview", *(["slow"] if found.exchanges else []), *(["rebalances"] if found.rebalances else [])]
    for job in jobs:
        _say(f"  {shlex.join(['kproxy', 'analyze', job, str(folder)])}")


def _show_overview(found: Overview) -> None:
    assert found.first_ns is not None and found.last_ns is not None
    lasted = units.duration(found.last_ns - found.first_ns)
    first, last = units.time(found.first_ns), units.time(found.last_ns)
    last = last.removeprefix(first.split()[0]).lstrip()
    _say(f"{first} to {last} UTC, {lasted}: {found.exchanges:,} exchanges")
    clients = Counter({client or "(no client id)": count for client, count in found.clients.items()})
    brokers: Counter[str] = Counter()
    for (where, node), count in found.brokers.items():
        brokers[where if node is None else f"{node} at {where}"] += count
    _say(f"brokers  {_names(brokers)}", f"clients  {_names(clients)}", "")
    _show_apis(found.apis)
    if found.errors:
        errors = found.errors.most_common(NAMES_SHOWN)
        more = f", and {len(found.errors) - len(errors)} more kinds" if len(found.errors) > len(errors) else ""
        _say(f"errors   {', '.join(f'{error} {api} ×{count:,}' for (error, api), count in errors)}{more}")
    if found.groups or found.leadership:
        _say(f"groups   {_known(found)}")
    for number, slow in enumerate(found.slowest):
        muted = f", of it {units.duration(slow.muted_ns)} muted by a throttle" if slow.muted_ns else ""
        client = printable(slow.client) or "no client id"
        what = f"{slow.api} of {client}, connection {slow.connection}, number {slow.number}"
        _say(f"{'slowest' if number == 0 else '':9}{units.duration(slow.total_ns)}{muted}: {what}")
    if found.slowest and (waiting := [api for api in ("Fetch", "JoinGroup", "SyncGroup") if api in found.apis]):
        _say(f"{'':9}(not counting the time that {', '.join(waiting)} wait on purpose)")
    _say("")


def _known(found: Overview) -> str:
    """What happened in groups and to leaders."""
    said = []
    if found.groups:
        causes = ", ".join(f"{cause} ×{count:,}" for cause, count in found.rebalances.most_common(NAMES_SHOWN))
        rebalances = f"{found.rebalances.total():,} rebalances" + (f" ({causes})" if causes else "")
        said.append(f"{len(found.groups):,}, {rebalances}")
    if found.leadership:
        changes = ", ".join(f"{change} ×{count:,}" for change, count in found.leadership.most_common(NAMES_SHOWN))
        said.append(f"{found.leadership.total():,} changes of leaders ({changes})")
    return "; ".join(said) if found.groups else f"none; {said[0]}"


def _show_apis(apis: dict[str, Api]) -> None:
    shown = sorted(apis.items(), key=lambda item: (-item[1].exchanges, item[0]))[:APIS_SHOWN]
    rows: list[tuple[str, ...]] = [("", "exchanges", "errors", "latency p50", "p99", "max")]
    for name, api in shown:
        durations = (api.quantile_ns(0.5), api.quantile_ns(0.99), api.max_ns)
        times = ("" if value is None else units.duration(value) for value in durations)
        rows.append((name, f"{api.exchanges:,}", f"{api.errors:,}" if api.errors else "", *times))
    _table(rows, "<>>>>>")
    if len(apis) > len(shown):
        _say(f"and {len(apis) - len(shown)} more APIs")


def _names(counts: Counter[str]) -> str:
    shown = [printable(name) for name, _ in counts.most_common(NAMES_SHOWN)]
    more = f" and {len(counts) - len(shown):,} more" if len(counts) > len(shown) else ""
    return f"{', '.join(shown)}{more}"


def _table(rows: Sequence[tuple[str, ...]], sides: str) -> None:
    """Rows whose columns are as wide as needed; `sides` says of each column whether it is left- or right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        _say("  ".join(cells))


def _say(*lines: str) -> None:
    for line in lines:
        click.echo(line.rstrip())


def _no_records(chosen: Sequence[str], seen: Sequence[str]) -> str:
    none = f"No records of {', '.join(chosen)}"
    if not seen:
        return f"{none}: no record batches were seen."
    more = f", and {len(seen) - TOPICS_SHOWN} more" if len(seen) > TOPICS_SHOWN else ""
    return f"{none}. There are batches of {', '.join(seen[:TOPICS_SHOWN])}{more}."


def verdict(quality: Quality, key_log: str | None = None) -> str:
    """One sentence: how far the tables can be trusted. `key_log`: the file that was to decrypt TLS."""
    if not quality.count("packets"):
        return "There is no packet in it."
    if not quality.count("kafka"):
        if quality.count("tls") and key_log is not None:
            return (
                f"No plaintext Kafka in it, and {printable(key_log)} has the keys of none of its TLS connections: "
                "give the key log that was written while the capture ran."
            )
        if quality.count("tls"):
            return "No plaintext Kafka in it; to read the TLS connections, give their keys with --key-log FILE."
        if quality.count("zookeeper"):
            lost = losses(quality, key_log)
            whole = f"Not complete: {', '.join(lost)}." if lost else "Complete."
            return f"No Kafka in it, but ZooKeeper, whose operations are in the table registry. {whole}"
        return "No Kafka in it. If there should be, name the brokers' ports with --port."
    lost = losses(quality, key_log)
    twice = " Exchanges of connections captured twice are counted twice." if quality.count("same_stream") else ""
    if not lost:
        return "Complete: every byte that the ends acknowledged was captured." + twice
    return f"Not complete: {', '.join(lost)}. An exchange without an answer may have had one." + twice


def losses(quality: Quality, key_log: str | None = None) -> list[str]:
    """Why tables of a capture may lack something; nothing: they do not."""
    return [
        text
        for kind, text in (
            ("kernel_drops", "the capturing machine dropped packets"),
            ("gap", "there are holes"),
            ("truncated", "packets were cut by the snap length"),
            ("cut_file", "the file is cut"),
            ("damaged", "the file is damaged"),
            ("fragments", "IP fragments are missing"),
            ("malformed", "packets make no sense"),
            ("unknown_link", "packets are of a link type that is not read"),
            ("midstream", "connections were open before the capture began"),
            ("resync", "bytes were skipped to find the next frame"),
            ("strays", "segments fit no window of their connection"),
            ("zookeeper_fault", "ZooKeeper connections break their protocol"),
            ("fault", "connections break the protocol or answer what was not captured"),
            ("idle", "too many connections were open at once"),
            ("tls", "some connections are encrypted" + (" with keys that the key log lacks" if key_log else "")),
        )
        if quality.count(kind)
    ]
