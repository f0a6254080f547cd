"""`kproxy spark JOB` and `kproxy spark ingest`: their options, and one call.

Duty: the questions of `kproxy analyze` for captures that outgrow one machine. Help needs no pyspark. Spark's own words
are kept from the terminal: its log goes to a file that is shown when it fails, and its errors are printed in plain
words.
"""

import errno
import logging
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, Any

import click

from kproxy.cli import captures
from kproxy.cli.asking import Asked, check_tables, commands, overview_command, show_overview, with_options
from kproxy.cli.findings import findings_command, show_findings
from kproxy.errors import KproxyError
from kproxy.interrupts import Asks

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame, SparkSession

    from kproxy.convert.job import Settings, Summary

# The driver of `ingest` plans, and on one machine moves few and large rows: optimizing that costs more than it saves.
PLANNING = (
    "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled=false",
    "spark.sql.codegen.wholeStage=false",
    "spark.sql.codegen.factoryMode=NO_CODEGEN",
)

# pyspark logs the whole Java stack of an error to these, as one line of JSON, before it raises the error that we print.
_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")

# How the JVM notices that a process of Python's ended.
_GONE = re.compile(r"^(?:Broken pipe|Connection reset)|Python worker exited unexpectedly")

_STARTING = "starting Spark"
_OUT_HELP = "Folder of the tables. Each table is a subfolder, by date and hour: DIR/exchanges/date=2026-11-28/hour=14."
_LOOK_S = 1  # how soon Ctrl-C ends what waits for captures
_SPARK = (
    click.option(
        "--master", metavar="URL", help="Spark's master, or sc://HOST:PORT. Default: spark-submit's, else local[*]."
    ),
    click.option("--conf", "config", metavar="KEY=VALUE", multiple=True, help="Setting of Spark."),
)


def require_pyspark() -> None:
    """Raise ModuleNotFoundError without pyspark, before another package of its extra is missed."""
    if find_spec("pyspark") is None:
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")


def started(master: str | None, config: tuple[str, ...], *, with_source: bool = False) -> "SparkSession":
    """The session that runs, or a new one whose log does not reach the terminal."""
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    from kproxy import spark

    for name in _LOGGERS:
        PySparkLogger.getLogger(name).disabled = True
    # py4j logs two stacks for each interrupt, by the root logger: pyspark ends all jobs meanwhile.
    logging.getLogger().addFilter(lambda record: Path(record.pathname).parent.name != "py4j")
    if wrong := [setting for setting in config if not re.match("[^=]+=", setting)]:
        raise KproxyError(f"--conf {wrong[0]}: KEY=VALUE is needed, like spark.driver.memory=4g")
    settings = dict(setting.partition("=")[::2] for setting in config)
    start = partial(spark.session, master, settings, with_source=with_source)
    if spark.is_remote(master):
        return start()
    is_ours = SparkSession.getActiveSession() is None and "PYSPARK_GATEWAY_PORT" not in os.environ
    if is_ours:
        _require_java()
    if not is_ours or "spark.log.level" in settings:
        return start()
    with _log_kept():
        return start()


def _require_java() -> None:
    """Raise KproxyError where Spark's own script would find no Java: if JAVA_HOME is set, it looks only there."""
    home = os.environ.get("JAVA_HOME")
    if home and not Path(home, "bin", "java").is_file():
        raise KproxyError(f"JAVA_HOME is {home}, which has no bin/java: set it to where Java 17 or newer is")
    if not home and not shutil.which("java"):
        raise KproxyError(
            "Spark needs Java 17 or newer, and there is none: install it (apt install openjdk-17-jre-headless), or set "
            "JAVA_HOME to where it is"
        )


@contextmanager
def _log_kept() -> Iterator[None]:
    """The JVM that starts meanwhile logs to a file, not to standard error; its last lines are shown if it fails."""
    with TemporaryFile() as log:
        sys.stderr.flush()
        terminal = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield
        except KproxyError as fault:
            log.seek(0)
            raise KproxyError(_why_not_started(str(fault), log.read().decode(errors="replace"))) from fault
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def _why_not_started(fault: str, log: str) -> str:
    """The reason of a failed start in the JVM's log, in one line; else pyspark's message, and the log's last lines."""
    if "UnsupportedClassVersionError" in log:
        return "Spark needs Java 17 or newer, and this one is older: set JAVA_HOME to where a newer one is"
    has_no_word = re.search(r'^Exception in thread "main" *$', log, re.MULTILINE)  # no message, for lack of memory
    if has_no_word or "OutOfMemoryError" in log:
        return "Spark does not start: its memory is too small: give it more, as by --conf spark.driver.memory=1g"
    found = re.search(r"^(?:Exception in thread .*? [\w.$]+(?:Exception|Error)|Error): (.+)", log, re.MULTILINE)
    if found and found[1].startswith("Could not create the Java Virtual Machine") and found.start():
        return f"Spark does not start: {log[: found.start()].strip().splitlines()[-1]}"  # which says why
    if found:
        return f"Spark does not start: {found[1]}"
    return "\n".join([fault, *log.strip().splitlines()[-5:]]) if "JAVA_GATEWAY_EXITED" in fault else fault


def _is_of_this_machine(master: str | None) -> bool:
    """Whether tasks read the files that we see: no cluster, and no server of Spark Connect."""
    from kproxy.spark import is_remote

    if is_remote(master) or "PYSPARK_GATEWAY_PORT" in os.environ:
        return False
    return master is None or master.startswith("local")


def answer(asked: Asked, master: str | None, config: tuple[str, ...]) -> None:
    """Answer a question on Spark and show it."""
    require_pyspark()

    from kproxy.analysis.question import Question

    question = Question(asked.job, asked.options, **asked.chosen)
    (folder,) = asked.places
    others = [asked.other] if asked.other is not None else []
    for line in question.check():
        if not asked.quiet:
            click.echo(line, err=True)
    check_tables([folder, *others], asked.job.tables, asked.quiet)

    from kproxy.views import answers, progress

    with progress.waiting(_STARTING, asked.quiet):
        session = started(master, config)
    with _said_plainly():
        tables = _tables(session, folder, asked.job.tables)
        first = asked.job.tables[0]
        other = None if asked.other is None else _tables(session, asked.other, [first])[first]
        answers.show(question.answer(tables, other), asked.shown, asked.out, asked.limit, asked.quiet)


def _tables(session: Any, folder: str, names: Collection[str]) -> "dict[str, DataFrame]":
    """The tables of a folder. Raises KproxyError where a run of ingest has not finished to put them in their places."""
    from kproxy import spark
    from kproxy.spark.target import Target
    from kproxy.tables import dataset

    if "://" in folder and Target(session, folder).is_unfinished:  # of this machine `table` looks itself
        raise dataset.unfinished(folder)
    return {name: spark.table(session, folder, name) for name in names}


def overview(places: tuple[str, ...], master: str | None, config: tuple[str, ...], **given: Any) -> None:
    """Show what is in tables, by Spark."""
    require_pyspark()

    from kproxy.analysis.question import times
    from kproxy.analysis.questions.sections import TABLES

    times("exchanges", given["since"], given["until"])
    (folder,) = places
    check_tables([folder], TABLES, given["quiet"])

    from kproxy.views import progress

    with progress.waiting(_STARTING, given["quiet"]):
        session = started(master, config)
    with _said_plainly():
        show_overview("spark", places, _tables(session, folder, TABLES), **given)


def findings(places: tuple[str, ...], master: str | None, config: tuple[str, ...], **given: Any) -> None:
    """Show what stands out, by Spark."""
    require_pyspark()

    from kproxy.analysis.findings import TABLES

    (folder,) = places
    check_tables([folder], TABLES, given["quiet"])

    from kproxy import spark
    from kproxy.views import progress

    with progress.waiting(_STARTING, given["quiet"]):
        session = started(master, config)
    with _said_plainly():
        tables = _tables(session, folder, TABLES)
        with suppress(KproxyError):  # records are there only where they were asked for
            tables["records"] = spark.table(session, folder, "records")
        show_findings(tables, **given)


@contextmanager
def _said_plainly() -> Iterator[None]:
    """Errors of Spark as one line."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as fault:
        raise KproxyError(_removed(str(fault)) or _in_words(fault)) from None
    except Py4JJavaError as fault:  # raised in a task while rows are fetched one by one
        text = str(fault)
        causes = re.findall(r"Caused by: \S+: (\[[A-Z_.]+\] .*)", text) or re.findall(r"Caused by: (.*)", text)
        fault_text = _plain(causes[-1] if causes else str(fault.java_exception))
        raise KproxyError(_removed(fault_text) or fault_text) from None


def _removed(text: str) -> str | None:
    """The message for a file that Spark did not find since retention may have removed it; None: another error."""
    from kproxy.tables.live.retention import REMEDY, is_recorded

    found = re.search(r"/([^/\s]+\.parquet)\W*? [Ff]ile does not exist|/([^/\s]+\.parquet) does not exist", text)
    if found is None or not is_recorded(found[1] or found[2]):
        return None
    return f"retention removed files of this recording while Spark read them: ask again, or {REMEDY}"


def _in_words(fault: "PySparkException") -> str:
    """Spark's message in one line, without the names of its error classes."""
    condition, parameters = fault.getCondition() or "", fault.getMessageParameters() or {}
    if condition.startswith("UNRESOLVED_COLUMN"):
        near = re.findall(r"`(\w+)`", parameters.get("proposal", ""))
        return f"there is no column {parameters.get('objectName', '').strip('`')}" + (
            f": did you mean {' or '.join(near[:3])}?" if near else ""
        )
    if condition.startswith("PARSE_"):
        place = f" near {parameters['error']}" if "error" in parameters else ""
        return f"--where cannot be read{place}: give a condition in SQL, like \"api = 'Fetch'\""
    return _plain(str(fault))


def _plain(text: str) -> str:
    """The first sentence of a Spark error, without its class, its code, and advice about Spark's settings."""
    first, *more = [line.strip() for line in text.strip().splitlines() if line.strip()] or [""]
    while first.endswith(":") and more:  # as where Python does not start on an executor
        first = f"{first} {more.pop(0)}"
    first = re.sub(r"^(?:[\w$]+\.)+[\w$]+(?:Exception|Error): ", "", first.partition(" SQLSTATE")[0])
    return re.sub(r" Use `try_\w+` .*", "", re.sub(r"^\[[A-Z_.]+\] ", "", first))


# Settings of both commands that make tables.
_TABLES = (
    captures.options,
    click.option("--detail", type=click.Choice(("headers", "topics", "batches")), default="batches", show_default=True),
    click.option(
        "--records",
        metavar="TOPIC[,...]",
        help="Also write the table `records` for these topics (names, ids, or patterns with *).",
    ),
    click.option(
        "--record-values",
        metavar="N|hash|all",
        default=captures.VALUES,
        show_default=True,
        help="Bytes of keys, values and headers to keep in `records`: the first N, a hash, or all.",
    ),
    click.option(
        "--format",
        "form",
        default="parquet",
        show_default=True,
        metavar="NAME",
        help="Format of the tables: any that the session can write, like delta.",
    ),
)


def _settings(how: dict[str, Any], **more: Any) -> "Settings":
    return captures.settings(how, records=captures.records(how.pop("records"), how.pop("record_values")), **more)


@contextmanager
def _name_remedy(out: str, config: tuple[str, ...]) -> Iterator[None]:
    """Add a remedy to errors of the JVM that only report a full disk, or that the process of a task has ended."""
    try:
        yield
    except KproxyError as fault:
        if _GONE.search(str(fault)):
            raise KproxyError(
                "a task's process ended: was it short of memory? Each takes some 300 MB: name fewer of them, like "
                "--master 'local[1]'; nothing was written"
            ) from fault
        if str(fault) != os.strerror(errno.ENOSPC):
            raise
        works = dict(setting.partition("=")[::2] for setting in config).get("spark.local.dir", gettempdir())
        raise KproxyError(
            f"{fault}: in {out}, or in {works}, where Spark works (--conf spark.local.dir=...); nothing was written"
        ) from fault


@contextmanager
def _a_task_failed() -> Iterator[None]:
    """An error in a task of Python's as one line."""
    from pyspark.errors import PythonException

    try:
        yield
    except PythonException as fault:  # its last line says what
        lines = [line for line in str(fault).splitlines() if line.strip() and "SQLSTATE" not in line]
        raise KproxyError(f"a task failed: {lines[-1].strip()}; nothing was written") from fault


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="CAPTURE...")
@click.option("--out", required=True, metavar="DIR", help=_OUT_HELP)
@click.option("--append", is_flag=True, help="Add to existing tables; captures that they contain already are skipped.")
@click.option("--overwrite", is_flag=True, help="Replace existing tables.")
@click.option("--strict", is_flag=True, help="Exit with status 1 if tables are not complete.")
@click.option(
    "--tasks", type=click.IntRange(0), default=0, metavar="N", help="Number of decoding tasks. Default: one per 64 MiB."
)
def ingest(
    places: tuple[str, ...],
    out: str,
    master: str | None,
    config: tuple[str, ...],
    tasks: int,
    append: bool,
    overwrite: bool,
    strict: bool,
    form: str,
    **how: Any,
) -> None:
    """Turn captures of any size into the tables of `kproxy convert`, on all cores of this machine or on a cluster.

    CAPTURE is a file, a folder, a pattern, or the URL of one. In a folder, ingest reads the files *.pcap, *.pcapng and
    *.cap, also compressed; for subfolders, give a pattern such as 'captures/*/*.pcap'. On a cluster, every executor
    must reach the captures and the folder of --out by the same paths. For less than about 10 GB `kproxy convert` is
    faster. See docs/scale.md.

    \b
    The captures in the folder `captures`; later, the captures added to it since; on a cluster:
      kproxy spark ingest captures --out tables
      kproxy spark ingest captures --out tables --append
      kproxy spark ingest 's3://captures/*.pcap.gz' --out s3a://tables/day --master spark://host:7077
    """
    require_pyspark()

    from kproxy.convert.job import Summary
    from kproxy.spark import pipeline
    from kproxy.views import progress
    from kproxy.views import summary as summary_view

    settings = _settings(how, overwrite=overwrite)
    _, catalogue = pipeline.check(places, out, settings, append=append)
    if _is_of_this_machine(master) and (faults := pipeline.unreadable(catalogue)):
        sys.exit(1 if summary_view.show(Summary(Path(out), failed=faults)) else 0)
    with progress.waiting(_STARTING) as says:
        session = started(master, (*PLANNING, *config))
        with _name_remedy(out, config), _said_plainly(), _a_task_failed():
            summary = pipeline.ingest(
                session, catalogue, out, settings, append=append, form=form, tasks=tasks, progress=says
            )
    if append and not summary.quality and not summary.failed:
        click.echo(f"{out} has all of these captures already: nothing was added")
    if summary_view.show(summary, strict=strict):
        sys.exit(1)


@click.command()
@click.argument("folder", metavar="FOLDER")
@click.option("--out", required=True, metavar="DIR", help=_OUT_HELP)
@click.option("--checkpoint", metavar="DIR", help="Folder for Spark's position. Default: _follow among the tables.")
@click.option(
    "--interval-s",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Time between two looks at the folder.",
)
@click.option(
    "--quiet-s",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Time without a change after which a file counts as complete.",
)
@click.option("--once", is_flag=True, help="Read the files that are there, and exit.")
def follow(
    folder: str,
    out: str,
    master: str | None,
    config: tuple[str, ...],
    checkpoint: str | None,
    interval_s: float,
    quiet_s: float,
    once: bool,
    form: str,
    **how: Any,
) -> None:
    """Add each capture that appears in a folder to tables, once, until interrupted.

    It reads a file of any name and age when it is complete, unless its name ends in .part or .tmp. From a folder
    in a storage it reads only *.pcap, *.pcapng and *.cap, also compressed; from a pattern such as
    's3://captures/kafka/*', the files that match. A checkpoint holds the files that were read, so that a killed run
    resumes where it was. With --rotated the files found by one look are one capture: exchanges that cross from one file
    into the next are whole. Exchanges that span two looks are split, and the tables mark them so.

    \b
    Follow tcpdump, which begins a file each minute, and follow a bucket:
      tcpdump -i any -s 0 -G 60 -w 'captures/%s.pcap' port 9092
      kproxy spark follow captures --out tables --rotated
      kproxy spark follow s3://captures/kafka --out s3a://tables/kafka
    """
    require_pyspark()

    from kproxy.spark import follow as following
    from kproxy.views import progress
    from kproxy.views import summary as summary_view

    settings = _settings(how)
    following.check(folder, out, settings)

    from pyspark.errors import StreamingQueryException

    with progress.waiting(_STARTING):
        session = started(master, (*PLANNING, *config), with_source=True)
    looks = 0  # that found something

    def told(summary: "Summary") -> None:
        nonlocal looks
        looks += 1
        summary_view.show(summary)

    query = following.follow(
        session,
        folder,
        out,
        settings,
        told,
        checkpoint=checkpoint,
        interval_s=interval_s,
        quiet_s=quiet_s,
        form=form,
    )
    try:
        with Asks(lambda: click.echo("ends after the batch under way; Ctrl-C again drops it", err=True)) as end:
            if once:
                query.processAllAvailable()
            else:
                while not (query.awaitTermination(_LOOK_S) or (end.asked and not query.status["isTriggerActive"])):
                    pass
        if once and not looks:  # else who names the checkpoint of other tables has none, and knows not why
            click.echo(f"{folder}: nothing new: what is complete in it was read already, says the checkpoint", err=True)
    except KeyboardInterrupt:
        click.echo("what is under way is dropped: the next start reads it", err=True)
        logging.getLogger("py4j").disabled = True  # both would show a stack for it
        session.sparkContext.setLogLevel("OFF")
    except StreamingQueryException as fault:
        lines = [line for line in str(fault).splitlines() if "Error: " in line]
        raise KproxyError(lines[-1].strip() if lines else _plain(str(fault))) from fault
    finally:
        query.stop()


COMMANDS = {
    "ingest": with_options((*_TABLES, *_SPARK), ingest),
    "follow": with_options((*_TABLES, *_SPARK), follow),
    "findings": findings_command("spark", click.argument("places", metavar="TABLES"), _SPARK, findings),
    "overview": overview_command("spark", click.argument("places", metavar="TABLES"), _SPARK, overview),
    **commands("spark", click.argument("places", metavar="TABLES"), _SPARK, answer),
}
