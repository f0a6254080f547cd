"""Output of `kproxy convert` and of an ingest: a summary of captures that were turned into tables.

Duty: prints the quality of each capture, an overview if it is given one, the rows written, and the next commands to
type. Complaints go to standard error. It computes no counts.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import click

from kproxy.capture.connections.content import TUNNELS
from kproxy.capture.quality import Quality, Row
from kproxy.convert.job import Summary
from kproxy.tables.dataset import read_manifest
from kproxy.views import units
from kproxy.views.terminal import printable


class Counts(Protocol):
    """Number of occurrences of each kind of `quality`; `Quality` implements it."""

    def count(self, kind: str) -> int: ...


# Of connections that are Kafka's by --port: where content shows that they are, it is by a request that has a row.
NOTHING_READ = (
    "no exchange was read from the connections that count as Kafka's by --port: they speak another protocol, or the "
    "capture has no whole request of them"
)
MAYBE_ANSWERED = "A request without an answer may have been answered."
TOPICS_SHOWN = 20
NAMES_SHOWN = 4
_SUBJECT = re.compile(  # the first noun of a sentence of `quality`
    r"\b(attempt|batch(?=es)|broker|cluster|connect|connection|exchange|file|fragment|gap|handshake|message|operation"
    r"|packet|place|retransmission|segment|set|time|token)(?:e?s)\b|(?<=packet )(record)s\b"
)
_SINGULAR = (  # of its verbs and pronouns
    ("that were", "that was"),
    ("and were", "and was"),
    ("that all have", "that has"),
    ("that end", "that ends"),
    ("that have", "that has"),
    ("that speak", "that speaks"),
    ("that look", "that looks"),
    ("that they", "that it"),
    ("that are", "that is"),
    ("they are", "it is"),
    ("they do", "it does"),
    ("they carry", "it carries"),
    ("which give", "which gives"),
    ("their", "its"),
    ("before them", "before it"),
    ("read them", "read it"),
)


def show(summary: Summary, first_sight: Sequence[str] | None = None, *, strict: bool = False) -> int:
    """Print a summary; returns the number of complaints. first_sight: the lines of an overview.

    A complaint is a capture that failed, no Kafka in any capture or no exchange of it, and with `strict` a capture with
    incomplete tables.
    """
    for source, quality in summary.quality.items():
        _say(printable(source))
        _table(
            [(f"{row.count:,}", units.size(row.bytes) if row.bytes else "", _fitting(row)) for row in quality], ">><"
        )
        _say(verdict(quality, summary.key_log), "")
    if first_sight:
        _say(*first_sight, "")
    found = summary.found_kafka or summary.found_zookeeper
    for name, rows in sorted(summary.rows.items()) if summary.quality else ():
        if not (rows or found):
            continue  # a list of empty tables would hide that there is no Kafka
        _say(printable(f"{rows:>12,} {'row ' if rows == 1 else 'rows'}  {summary.folder / name}"))
    if first_sight is not None and summary.quality:
        others = [
            source for source in read_manifest(summary.folder).get("sources", ()) if source not in summary.quality
        ]
        if others:
            more = f" and {len(others) - NAMES_SHOWN} more captures" if len(others) > NAMES_SHOWN else ""
            _say(printable(f"{summary.folder} also holds {', '.join(sorted(others)[:NAMES_SHOWN])}{more}"))
    if summary.chosen is not None and not summary.rows.get("records"):
        _say(printable(_no_records(summary.chosen.topics, summary.topics)))
    complaints = [printable(str(fault)) for fault in summary.failed]
    if summary.quality and not found:
        complaints.append("no Kafka was found: the tables have no exchanges")
    elif summary.found_kafka and not summary.rows.get("exchanges"):
        complaints.append(NOTHING_READ)
    elif strict:
        complaints += [
            f"{printable(source)} is not complete (--strict)"
            for source, quality in summary.quality.items()
            if losses(quality, summary.key_log)
        ]
    for complaint in complaints:
        click.echo(f"kproxy: {complaint}", err=True)
    return len(complaints)


def show_next(commands: Sequence[str]) -> None:
    """Print the commands for further questions."""
    if commands:
        _say("", "Next:", *(f"  {command}" for command in commands))


def _table(rows: Sequence[tuple[str, ...]], sides: str) -> None:
    """Print rows in columns. sides: the alignment of each column, "<" (left) or ">" (right)."""
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
    """Return one sentence about the completeness of the tables. key_log: the file with TLS keys, if one was given."""
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
        if failed := _failed(quality):
            return f"No Kafka in it: {failed}."
        if quality.count("zookeeper"):
            lost = losses(quality, key_log)
            whole = f"Not complete: {'; '.join(lost)}." if lost else "Complete."
            return f"No Kafka in it, but ZooKeeper, whose operations are in the table registry. {whole}"
        if quality.count("other_ports"):
            return "No Kafka in it at these ports. Without --port, Kafka is recognised by its content, on any port."
        if quality.count("undecided") and quality.count("one_direction"):
            return (
                "No Kafka in it that can be read: of some connections it has responses of brokers, and no request. "
                "Capture both directions."
            )
        if quality.count("truncated") and quality.count("undecided") and not quality.count("not_kafka"):
            return "No Kafka in it that can be read: its packets were cut by the snap length. Capture again with -s 0."
        if quality.count("undecided") and not quality.count("not_kafka"):
            return (
                "No Kafka in it that can be recognised. If there should be, name the brokers' ports with --port; if "
                "that finds none, the capture has no whole request: capture for longer, or before clients connect."
            )
        if quality.count("not_kafka"):
            return "No Kafka in it. If there should be, name the brokers' ports with --port."
        if quality.count("truncated"):
            where = "after" if quality.count("no_data") else "within"
            return f"No payload in it: its packets were cut {where} their headers. Capture again with -s 0."
        if quality.count("unread") or quality.count("unknown_link"):
            return "No Kafka in it that kproxy can read: see above which headers its packets are under."
        if quality.count("http"):
            return "No Kafka in it: its connections speak HTTP. Was the right interface, host or port captured?"
        if quality.count("other_protocol"):
            others = " ".join(row.sentence for row in quality if row.kind == "other_protocol")
            is_tunnelled = any(tunnel in others for tunnel in TUNNELS)
            return "No Kafka in it: its connections are of other protocols, which `kproxy analyze quality` names. " + (
                "kproxy does not read tunnels: capture between the tunnel's server and the brokers."
                if is_tunnelled
                else "Was the right interface, host or port captured?"
            )
        if quality.count("not_tcp") == quality.count("packets"):
            return "No Kafka in it, and no TCP. Was the right interface captured?"
        return "No Kafka in it: no connection carried a byte. Was the right interface captured?"
    lost = losses(quality, key_log)
    is_twice = quality.count("same_stream") or quality.count("in_two_captures")
    twice = " Exchanges of connections captured twice are counted twice." if is_twice else ""
    if not lost:
        return "Complete: every byte that the ends acknowledged was captured." + twice
    return f"Not complete: {'; '.join(lost)}. {MAYBE_ANSWERED}{twice}"


def why_nothing(quality: Iterable[Mapping[str, Any]], key_log: str | None = None) -> str:
    """Return why tables have no exchanges, and what to do, in sentences. quality: rows of their table quality."""
    found = Quality()
    for row in quality:
        found.note(row["kind"], count=row["count"] or 0, size=row["bytes"] or 0)
    if not found.count("packets"):
        return "The tables are empty: so are the captures, or nothing was recorded yet."
    if found.count("kafka"):
        text = f"{NOTHING_READ[0].upper()}{NOTHING_READ[1:]}"
        return f"{text}. Convert without --port: Kafka is then recognised by its content, on any port."
    return verdict(found, key_log)


def _failed(quality: Quality) -> str:
    """Return why connection attempts carried no data; "" if other connections carried unrecognised data."""
    if any(quality.count(kind) for kind in ("not_kafka", "undecided", "zookeeper")):
        return ""
    connects = {f"connect_{how}" for how in ("refused", "unanswered", "closed_at_once", "undelivered")}
    kinds = connects | {"tls_alert", "tls_unanswered"}
    return "; ".join(f"{row.count:,} {_fitting(row)}" for row in quality if row.kind in kinds)


def _fitting(row: Row) -> str:
    """Return the sentence of a row, in singular for one."""
    if row.count != 1:
        return row.sentence
    sentence = _SUBJECT.sub(r"\1\2", row.sentence, count=1)
    for many, one in _SINGULAR:
        sentence = re.sub(rf"\b{many}\b", one, sentence)
    return sentence


def losses(quality: Counts, key_log: str | None = None) -> list[str]:
    """Return the reasons why tables of a capture may be incomplete; empty if they are complete."""
    return [
        text
        for kind, text in (
            ("kernel_drops", "the capturing machine dropped packets"),
            ("one_direction", "only one direction of some connections was captured"),
            ("gap", "bytes are missing"),
            ("no_times", "its packets have no times, so durations and latencies are not known"),
            ("clock_step", "the clock was set during the capture; later times follow the clock before that"),
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
            ("fault", "connections break the protocol, or answer requests that were not captured"),
            ("idle", "too many connections were open at once"),
            ("tls", "some connections are encrypted" + (" with keys that the key log lacks" if key_log else "")),
        )
        if quality.count(kind)
    ]


def lacking(counts: Mapping[str, int]) -> list[str]:
    """Return the reasons why answers from tables may be incomplete. counts: by kind of `quality`.

    Connections that were open before the capture began are no loss here: nearly every capture has some.
    """

    class Known:
        def count(self, kind: str) -> int:
            return 0 if kind in ("midstream", "resync") else counts.get(kind, 0)

    return losses(Known())
