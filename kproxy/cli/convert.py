"""`kproxy convert`: the options of captures to tables. The work is that of `kproxy.convert`."""

import sys
from typing import Any

import click

from kproxy.cli import captures


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
    default="64",
    show_default=True,
    help="What `records` keeps of keys, values and headers: the first N bytes, a hash, or everything.",
)
@click.option("--overwrite", is_flag=True, help="Replace the tables of another capture that has the same name.")
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with status 1 if a capture is not complete (bytes lost, connections encrypted).",
)
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
    overwrite: bool,
    strict: bool,
    follow: bool,
    processes: int,
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

    from kproxy.analysis.overview import overview
    from kproxy.convert import machine
    from kproxy.convert import processes as conversion
    from kproxy.tables.records import chosen
    from kproxy.views import convert as convert_view
    from kproxy.views import summary as summary_view

    machine.retain()
    settings = captures.settings(
        how,
        detail=detail,
        checksums=checksums,
        records=None if records is None else chosen(records, record_values),
        overwrite=overwrite,
    )
    with convert_view.bar() as advance:
        summary = conversion.convert(places, out, settings, follow=follow, processes=processes, progress=advance)
    found = overview(summary.folder, summary.quality)
    complaints = summary_view.show(summary, found, strict=strict)
    summary_view.show_next(found, summary.folder, summary.paths, settings.identity)
    if complaints:
        sys.exit(1)
