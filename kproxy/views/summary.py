"""What is said, in plain words, of captures that were turned into tables.

Duty: the terminal side only; nothing is decided or counted here.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kproxy.capture.quality import Quality
from kproxy.convert.job import Summary

TOPICS_SHOWN = 20


def tell(summary: Summary) -> None:
    """The rows written and the quality of each capture to standard output; captures that failed to standard error."""
    console = Console(highlight=False, soft_wrap=True)
    for source, quality in summary.quality.items():
        table = Table(
            title=Text(printable(source)), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
        )
        table.add_column(justify="right")
        table.add_column(justify="right")
        table.add_column()
        for row in quality:
            table.add_row(f"{row.count:,}", _bytes(row.bytes), row.sentence)
        console.print(table)
        console.print(verdict(quality, summary.key_log) + "\n")
    for name, rows in sorted(summary.rows.items()):
        console.print(Text(printable(f"{rows:>12,} rows  {summary.folder / name}")))
    if summary.chosen is not None and not summary.rows.get("records"):
        console.print(Text(printable(_no_records(summary.chosen.topics, summary.topics))))
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    for fault in summary.failed:
        errors.print(Text(printable(f"kproxy: {fault}")))


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
            return "No plaintext Kafka in it; the TLS connections need a key log that has their keys to be read."
        return "No Kafka in it. If there should be, name the brokers' ports with --port."
    lost = [
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
            ("fault", "connections break the protocol or answer what was not captured"),
            ("idle", "too many connections were open at once"),
            ("tls", "some connections are encrypted" + (" with keys that the key log lacks" if key_log else "")),
        )
        if quality.count(kind)
    ]
    twice = " Exchanges of connections captured twice are counted twice." if quality.count("same_stream") else ""
    if not lost:
        return "Complete: every byte that the ends acknowledged was captured." + twice
    return f"Not complete: {', '.join(lost)}. An exchange without an answer may have had one." + twice


def printable(text: str) -> str:
    """Text with the names of files in it: nothing in it moves the cursor."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _bytes(size: int) -> str:
    if not size:
        return ""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
