"""`kproxy report`: captures or tables as one HTML file. Logic is in `kproxy.analysis` and `kproxy.views`."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kproxy.cli import captures
from kproxy.cli.asking import PLACES, TIMES, why_nothing, with_options
from kproxy.errors import KproxyError

BEFORE = 3  # exchanges before a slow one


def _report(
    places: tuple[str, ...], out: str, other: str | None, since: str | None, until: str | None, quiet: bool, **how: Any
) -> None:
    """Write a report of captures or tables: one HTML file that opens anywhere.

    Latencies by API over time, the slowest exchanges explained, load, errors, throttles, topics and lag, groups and
    leaders, the network, and the flaws of the capture; with plots. The file is self-contained and loads nothing. It
    contains addresses and names of clients, topics and groups, and no keys or values of records.

    \b
    Examples:
      kproxy report incident.pcap --out report.html
      kproxy report tables --out report.html --from 10:15 --to 10:25
      kproxy report tables --compare tables-before --out report.html
    """
    path = Path(out)
    _check_out(path)
    import altair  # noqa: F401  fails, with what to install, before a capture is converted
    import vl_convert  # noqa: F401

    from kproxy.analysis import cached
    from kproxy.analysis.duck import Tables
    from kproxy.analysis.jobs import JOBS
    from kproxy.analysis.question import moment
    from kproxy.analysis.questions import figures, single
    from kproxy.cli.analyze import in_words, tables_at
    from kproxy.views import answers, progress, report

    for option, text in (("--from", since), ("--to", until)):
        if text is not None:
            moment(text, option)
    needed = ("batches", *sorted({table for job in JOBS.values() for table in job.tables}))
    is_capture = not (len(places) == 1 and cached.is_dataset(places[0]))
    options = _options(how) if is_capture else []
    with (
        tables_at(places, needed, how, quiet) as folder_of,
        tables_at([other] if other else places, needed, how, quiet) as other_of,
        in_words("the question"),
    ):
        folder = folder_of(False)
        other_folder = None if other is None else other_of(False)
        with (
            Tables(folder, [other_folder] if other_folder else []) as tables,
            progress.waiting("report", quiet) as show_progress,
        ):
            compared = (
                None if other_folder is None else {name: tables.beside(other_folder, name) for name in figures.TABLES}
            )
            found = figures.answered(tables, since, until, compared, lambda name: show_progress(f"asking: {name}"))
            if found is None:
                why = why_nothing(tables, since, until, how["key_log"])
                raise KproxyError(f"{places[0]}: there is no exchange to report on. {why}")
            before = {
                (row["connection"], row["number"]): list(
                    answers.dicts(single.before(tables, row["connection"], row["number"], BEFORE, row["source"]))
                )
                for row in found["slow"].to_pylist()
                if row["number"] is not None
            }
            made = report.Report(
                found, places, options, is_capture, other, before, lambda name: show_progress(f"drawing: {name}")
            )
            text = report.html(made)
    try:
        _write(path, text)
    except OSError as fault:
        raise KproxyError(f"--out {path} cannot be written: {fault.strerror or fault}") from None
    click.echo(str(path))


def _check_out(path: Path) -> None:
    """Raise KproxyError where the file cannot be written, or is there and no report."""
    if not path.absolute().parent.is_dir():
        raise KproxyError(f"--out {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise KproxyError(f"--out {path} is a folder: name a file in it, like {path / 'report.html'}")
    if path.exists():
        with path.open("rb") as file:
            if b"<!-- kproxy report -->" not in file.read(64):
                raise KproxyError(f"--out {path} is there already and is no report of kproxy: name another file")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.absolute().parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def _options(how: dict[str, Any]) -> list[str]:
    """The options of captures as they were given."""
    words = [word for port in how["ports"] for word in ("--port", str(port))]
    words += [word for port in how["zookeeper_ports"] for word in ("--zookeeper-port", str(port))]
    words += ["--cluster", how["cluster"]] if how["cluster"] != "default" else []
    words += ["--rotated"] if how["rotated"] else []
    return words + (["--key-log", str(how["key_log"])] if how["key_log"] else [])


_CHOSEN = (
    PLACES,
    click.option("--out", required=True, metavar="FILE", help="File of the report; an existing one is replaced."),
    click.option(
        "--compare", "other", metavar="TABLES|CAPTURE", help="A second capture, or its tables, to compare with."
    ),
    *TIMES,
    *captures.OPTIONS,
    click.option("-q", "--quiet", is_flag=True, help="Print only errors on standard error."),
)
report = click.command("report")(with_options(_CHOSEN, _report))
