"""`kproxy convert`: the options of captures to tables. The work is that of `kproxy.convert`."""

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from kproxy.cli import captures

if TYPE_CHECKING:
    from kproxy.convert.job import Settings, Summary

NEXT = 3  # questions to go on with


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="CAPTURE...")
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder for the tables; each is a folder in it.")
@captures.options
@click.option(
    "--detail",
    type=click.Choice(("headers", "topics", "batches")),
    default="batches",
    show_default=True,
    help="headers: no rows of `partitions` and `batches`; topics: none of `batches`; batches: all.",
)
@click.option("--checksums", is_flag=True, help="Check the CRC of every batch (column `crc_valid`); reads every byte.")
@click.option(
    "--records",
    metavar="TOPIC[,...]",
    help="Write the table `records` for these topics (names, ids, or patterns with *).",
)
@click.option(
    "--record-values",
    metavar="N|hash|all",
    default=captures.VALUES,
    show_default=True,
    help="Bytes of keys, values and headers to keep in `records`: the first N, a hash, or all.",
)
@click.option("--append", is_flag=True, help="Add to a folder that has the tables of other captures.")
@click.option("--overwrite", is_flag=True, help="Replace the tables of another capture that has the same name.")
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with status 1 if a capture is not complete (bytes lost, connections encrypted).",
)
@click.option("-q", "--quiet", is_flag=True, help="No progress, and no overview at the end.")
@click.option("--follow", is_flag=True, help="Keep reading a file that still grows, until interrupted.")
@click.option(
    "--processes",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Number of processes. Default: as many as cores and memory allow.",
)
def convert(
    places: tuple[str, ...],
    out: str,
    detail: str,
    checksums: bool,
    records: str | None,
    record_values: str,
    append: bool,
    overwrite: bool,
    strict: bool,
    follow: bool,
    processes: int,
    quiet: bool,
    **how: Any,
) -> None:
    """Turn packet captures into Parquet tables.

    Exits with status 1 if a capture cannot be read, and if no Kafka was found in any.

    \b
    pcap or pcapng, plain or gzip, zstd, lz4; a folder stands for the captures in it, - for standard input:
      kproxy convert incident.pcap --out tables
      tcpdump -i any -s 0 -w - port 9092 | kproxy convert - --out tables
      kproxy convert incident.pcap --out tables --records 'orders,billing.*' --record-values hash
    \b
    And then, in any tool that reads Parquet:
      select api, approx_quantile(latency_ns, 0.99) from 'tables/exchanges/**/*.parquet' group by api
    """
    if follow and len(places) > 1 and not how["rotated"]:
        raise click.UsageError("--follow is of one capture, or of --rotated files, of which the last one grows")

    from kproxy.convert import machine
    from kproxy.convert import processes as conversion
    from kproxy.views import progress
    from kproxy.views import summary as summary_view

    machine.retain()
    settings = captures.settings(
        how,
        detail=detail,
        checksums=checksums,
        records=captures.records(records, record_values),
        append=append,
        overwrite=overwrite,
    )
    with progress.bar(quiet) as advance:
        summary = conversion.convert(places, out, settings, follow=follow, processes=processes, progress=advance)
    lines, commands = ([], []) if quiet else _first_sight(summary, settings)
    complaints = summary_view.show(summary, lines, strict=strict)
    summary_view.show_next(commands)
    if complaints:
        sys.exit(1)


def _first_sight(summary: "Summary", settings: "Settings") -> tuple[list[str], list[str]]:
    """A summary of the tables of these captures, in some ten lines, and the next commands to run."""
    if not any(summary.rows.values()):
        return [], []

    from kproxy.analysis.duck import Tables
    from kproxy.analysis.questions import sections
    from kproxy.capture.formats.storage import shown
    from kproxy.views import answers, progress
    from kproxy.views import overview as view

    with progress.waiting("overview"), Tables(summary.folder) as tables:
        ours = sections.of_sources(tables, summary.quality)
        frames = sections.overview(ours, chosen=sections.BRIEF)
        rows = {name: (list(answers.dicts(frame)), most) for name, (frame, most) in frames.items()}
        found = {name: some for name, (some, _) in rows.items()}
        questions = sections.next_questions("analyze", [str(summary.folder)], found, ours)[:NEXT]
    commands = [shlex.join(["kproxy", "analyze", "overview", str(summary.folder)]), *questions]
    for slow in found["slowest"][:1]:
        files = summary.paths[slow["source"]]
        if "-" not in files:  # standard input cannot be read again
            rotated = ["--rotated"] if len(files) > 1 else []
            which = ["--connection", str(slow["connection"]), "--number", str(slow["number"])]
            commands.append(shlex.join(["kproxy", "show", *map(shown, files), *which, *settings.reading, *rotated]))
    if found["apis"] or found["groups"] or found["zookeeper"]:
        return view.brief(rows), commands
    why_failed = shlex.join(["kproxy", "analyze", "findings", str(summary.folder)])
    has_failed_connects = bool(summary.rows.get("connections")) and not summary.found_kafka
    return view.brief(rows), [why_failed] if has_failed_connects else []
