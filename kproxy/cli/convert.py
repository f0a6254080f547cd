"""`kproxy convert`: the options of captures to tables. The work is that of `kproxy.convert`."""

import sys

import click


@click.command()
@click.argument("captures", nargs=-1, required=True, metavar="CAPTURE...")
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder for the tables; each is a folder in it.")
@click.option(
    "--port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    metavar="N",
    help="Port of a broker; may be repeated. Default: Kafka is recognised by its content, on any port.",
)
@click.option(
    "--zookeeper-port",
    "zookeeper_ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    metavar="N",
    help="Port of ZooKeeper, beside those of --port; may be repeated. Default: likewise by content.",
)
@click.option("--cluster", default="default", show_default=True, metavar="NAME", help="Value of the column `cluster`.")
@click.option(
    "--rotated", is_flag=True, help="The files are parts of one capture; they are read in the order of their packets."
)
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
@click.option(
    "--key-log",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="SSLKEYLOGFILE that decrypts the TLS connections; needs tshark.",
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
    captures: tuple[str, ...],
    out: str,
    ports: tuple[int, ...],
    zookeeper_ports: tuple[int, ...],
    cluster: str,
    rotated: bool,
    detail: str,
    checksums: bool,
    records: str | None,
    record_values: str,
    key_log: str | None,
    overwrite: bool,
    strict: bool,
    follow: bool,
    processes: int,
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
    if follow and len(captures) > 1 and not rotated:
        raise click.UsageError("--follow is of one capture, or of --rotated files, of which the last one grows")

    from kproxy.analysis.overview import overview
    from kproxy.convert import job, machine
    from kproxy.convert import processes as conversion
    from kproxy.tables.records import chosen
    from kproxy.views import convert as convert_view
    from kproxy.views import summary as summary_view

    machine.retain()
    settings = job.Settings(
        ports=ports,
        zookeeper_ports=zookeeper_ports,
        cluster=cluster,
        rotated=rotated,
        key_log=key_log,
        detail=detail,
        checksums=checksums,
        records=None if records is None else chosen(records, record_values),
        overwrite=overwrite,
    )
    with convert_view.bar() as advance:
        summary = conversion.convert(captures, out, settings, follow=follow, processes=processes, progress=advance)
    found = overview(summary.folder, summary.quality)
    complaints = summary_view.show(summary, found, strict=strict)
    summary_view.show_next(found, summary.folder, summary.paths, settings.identity)
    if complaints:
        sys.exit(1)
