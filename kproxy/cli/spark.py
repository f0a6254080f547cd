"""`kproxy spark JOB` and `kproxy spark ingest`: their options, what is checked before Spark starts, and one call.

Duty: a command per job, made from its function: its options are the function's parameters, its help the docstring. Help
needs no pyspark. Spark's own words are kept from the terminal: its log goes to a file that is shown when it fails, and
its errors are said in plain words.
"""

import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import click

from kproxy.analysis.jobs import JOBS, Job
from kproxy.errors import KproxyError

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

_PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "by": ("--by", {"metavar": "COLUMN,...", "help": "api, version, broker, client, host, or any column."}),
    "every": ("--every", {"metavar": "TIME", "help": "Also over time, in steps like '10 seconds' or '1 minute'."}),
    "slower_than_ms": (
        "--slower-than-ms",
        {"type": float, "metavar": "MS", "help": "Minimum total time, first request byte to last response byte."},
    ),
    "top": ("--top", {"type": int, "metavar": "N", "help": "How many, the slowest first."}),
    "replicas": ("--replicas", {"is_flag": True, "help": "Count brokers that replicate too."}),
    "kafka": ("--kafka", {"metavar": "RELEASE", "help": "The release to be ready for: 3.7.2, or 3.7."}),
    "other": ("--with", {"metavar": "TABLES", "required": True, "help": "The other dataset."}),
}

# The driver of `ingest` plans, and on one machine moves few and large rows: to optimize that costs more than it saves.
_PLANNING = ("spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1", "spark.sql.adaptive.enabled=false")

# To these pyspark logs the whole Java stack of a mistake, as one line of JSON, before it raises what we say in words.
_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")

_SPARK = (
    click.option("--master", metavar="URL", help="Spark's master. Default: spark-submit's, else local[*]."),
    click.option("--conf", "config", metavar="KEY=VALUE", multiple=True, help="A setting of Spark."),
)
_ANSWER = (
    click.option("--where", metavar="SQL", help="Only rows for which it holds, like \"api = 'Fetch'\"."),
    click.option("--format", "shown", type=click.Choice(("table", "json", "csv", "parquet")), default="table"),
    click.option("--out", metavar="DIR", help="Where --format parquet goes."),
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Rows at most. Default: 50 of a table."),
)


def _with(options: tuple[Callable[[Any], Any], ...], function: Any) -> Any:
    for option in reversed(options):
        function = option(function)
    return function


def _require_pyspark() -> None:
    """Raise ModuleNotFoundError without pyspark, before another package of its extra is missed."""
    if find_spec("pyspark") is None:
        raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")


def _session(master: str | None, config: tuple[str, ...]) -> "SparkSession":
    """The session that runs, or a new one whose log does not reach the terminal."""
    from pyspark.logger import PySparkLogger
    from pyspark.sql import SparkSession

    from kproxy import spark

    for name in _LOGGERS:
        PySparkLogger.getLogger(name).disabled = True
    settings = dict(setting.partition("=")[::2] for setting in config)
    is_ours = SparkSession.getActiveSession() is None and "PYSPARK_GATEWAY_PORT" not in os.environ
    if is_ours and not (shutil.which("java") or Path(os.environ.get("JAVA_HOME", ""), "bin", "java").is_file()):
        raise KproxyError(
            "Spark needs Java 17 or newer, and there is none: install it (apt install openjdk-17-jre-headless), or set "
            "JAVA_HOME to where it is"
        )
    if not is_ours or "spark.log.level" in settings:
        return spark.session(master, settings)
    with _log_kept():
        return spark.session(master, settings)


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
            lines = log.read().decode(errors="replace").strip().splitlines()
            raise KproxyError("\n".join([str(fault), *lines[-5:]])) from fault
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def _command(name: str, job: Job) -> click.Command:
    parameters = list(inspect.signature(job.run).parameters.values())[len(job.tables) :]

    def run(tables: str, where: str | None, shown: str, out: str | None, limit: int | None, **options: Any) -> None:
        _require_pyspark()
        master, config = options.pop("master"), options.pop("config")
        arguments = {key: value for key, value in options.items() if value is not None}
        if "by" in arguments:
            arguments["by"] = arguments["by"].replace(",", " ").split()
        own = _check(job, tables, where, shown, out, arguments)

        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        from kproxy import spark
        from kproxy.views import answers

        session = _session(master, config)
        try:
            frames = [spark.table(session, tables, table) for table in job.tables]
            if "other" in arguments:
                arguments["other"] = spark.table(session, arguments["other"], job.tables[0])
            if where is not None and own:
                arguments["where"] = where
            elif where is not None:
                frames[0] = frames[0].where(where)
                if "other" in arguments:
                    arguments["other"] = arguments["other"].where(where)
            answers.show(job.run(*frames, **arguments), shown, out, limit)
        except PySparkException as fault:
            raise KproxyError(_in_words(fault)) from None
        except Py4JJavaError as fault:  # of a task, while rows are fetched one by one
            text = str(fault)
            causes = re.findall(r"Caused by: \S+: (\[[A-Z_.]+\] .*)", text) or re.findall(r"Caused by: (.*)", text)
            raise KproxyError(_plain(causes[-1] if causes else str(fault.java_exception))) from None

    for parameter in parameters:
        if parameter.name == "where":  # an option of every job
            continue
        flag, settings = _PARAMETERS[parameter.name]
        default = parameter.default
        if default not in (inspect.Parameter.empty, None, False):
            said = ",".join(default) if isinstance(default, tuple) else default
            settings = {**settings, "help": f"{settings['help']} Default: {said}."}
        run = click.option(flag, parameter.name, **settings)(run)
    run = click.argument("tables", metavar="TABLES")(_with(_ANSWER, _with(_SPARK, run)))
    text = inspect.getdoc(job.run) or ""
    return click.Command(
        name,
        callback=run,
        params=list(reversed(run.__click_params__)),  # type: ignore[attr-defined]
        help=f"{text}\n\n\b\nExample:\n  kproxy spark {name} tables{job.example}",
        short_help=text.partition("\n")[0].partition(":")[0].rstrip(".") + ".",
    )


def _check(job: Job, tables: str, where: str | None, shown: str, out: str | None, arguments: dict[str, Any]) -> bool:
    """Raise KproxyError for what is known to be wrong without Spark; returns whether the job applies the condition."""
    from kproxy.analysis import checks, parties
    from kproxy.tables import dataset

    if (shown == "parquet") != (out is not None):
        raise KproxyError("--format parquet and --out go together: Parquet is written to a folder")
    if out is not None and "://" not in out and Path(out).exists():
        raise KproxyError(f"--out {out} is there already: name a folder that is not")
    for folder in (tables, *([arguments["other"]] if "other" in arguments else [])):
        for table in job.tables:
            dataset.has_rows(folder, table)
    if "by" in arguments:
        checks.check_groups(arguments["by"], job.tables[0])
    if "every" in arguments:
        checks.check_span(arguments["every"])
    if "kafka" in arguments:
        try:
            release, _ = parties.served_by(arguments["kafka"])
        except ValueError as fault:
            raise KproxyError(str(fault)) from fault
        if release != arguments["kafka"]:
            click.echo(f"Kafka {arguments['kafka']} is judged as {release}, the newest of its line", err=True)
    if where is None:
        return False
    checks.check_condition(where, job.tables[0])
    return job.where is None or (bool(job.where) and set(checks.names_in(where)) <= set(job.where))


def _in_words(fault: "PySparkException") -> str:
    """What Spark says, without the names of its error classes, and in one line."""
    condition, said = fault.getCondition() or "", fault.getMessageParameters() or {}
    if condition.startswith("UNRESOLVED_COLUMN"):
        near = re.findall(r"`(\w+)`", said.get("proposal", ""))
        return f"there is no column {said.get('objectName', '').strip('`')}" + (
            f": did you mean {' or '.join(near[:3])}?" if near else ""
        )
    if condition.startswith("PARSE_"):
        place = f" near {said['error']}" if "error" in said else ""
        return f"--where cannot be read{place}: give a condition in SQL, like \"api = 'Fetch'\""
    return _plain(str(fault))


def _plain(text: str) -> str:
    """The first line of an error of Spark without its class, its code, and advice about Spark's settings."""
    first = text.strip().partition("\n")[0].partition(" SQLSTATE")[0]
    return re.sub(r" Use `try_\w+` .*", "", re.sub(r"^\[[A-Z_.]+\] ", "", first))


@click.command()
@click.argument("captures", nargs=-1, required=True, metavar="CAPTURE...")
@click.option("--out", required=True, metavar="DIR", help="Where the tables go; a folder each, by date and hour.")
@click.option(
    "--port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    metavar="N",
    help="A broker's port. Default: by content.",
)
@click.option("--cluster", default="default", show_default=True, metavar="NAME", help="The column `cluster`.")
@click.option("--rotated", is_flag=True, help="The files are one capture, in the order of their packets.")
@click.option("--detail", type=click.Choice(("headers", "topics", "batches")), default="batches", show_default=True)
@click.option(
    "--records", metavar="TOPIC[,...]", help="The table `records` too, of these topics; * as in a shell, ids as names."
)
@click.option(
    "--record-values",
    metavar="N|hash|all",
    default="64",
    show_default=True,
    help="What it shows of a key, a value and a header: the first N bytes, a hash, or all of it.",
)
@click.option(
    "--key-log",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="SSLKEYLOGFILE of the TLS connections; needs tshark.",
)
@click.option("--overwrite", is_flag=True, help="Replace the tables that are there.")
@click.option("--strict", is_flag=True, help="Exit with status 1 where tables are not complete.")
@click.option("--tasks", type=click.IntRange(0), default=0, metavar="N", help="Of the decoding. Default: per 64 MiB.")
def ingest(
    captures: tuple[str, ...],
    out: str,
    master: str | None,
    config: tuple[str, ...],
    tasks: int,
    ports: tuple[int, ...],
    cluster: str,
    rotated: bool,
    detail: str,
    key_log: str | None,
    records: str | None,
    record_values: str,
    overwrite: bool,
    strict: bool,
) -> None:
    """Turn captures of any size into the tables that `kproxy convert` makes, by all cores or a whole cluster.

    Below some 10 GB `kproxy convert` is faster. Captures and tables must lie where every executor reaches them.

    \b
    On this machine, and on a cluster:
      kproxy spark ingest captures/*.pcap --out tables
      kproxy spark ingest /share/captures/*.pcap.gz --out /share/tables --master spark://host:7077
    """
    _require_pyspark()

    from kproxy.convert.job import Settings
    from kproxy.spark import pipeline
    from kproxy.tables.records import chosen
    from kproxy.views import summary as summary_view

    settings = Settings(
        ports=ports,
        cluster=cluster,
        rotated=rotated,
        key_log=key_log,
        detail=detail,
        records=None if records is None else chosen(records, record_values),
        overwrite=overwrite,
    )
    pipeline.check(captures, out, settings)

    from pyspark.errors import PythonException

    try:
        summary = pipeline.ingest(_session(master, (*_PLANNING, *config)), captures, out, settings, tasks=tasks)
    except PythonException as fault:  # of a task: its last line says what
        lines = [line for line in str(fault).splitlines() if line.strip() and "SQLSTATE" not in line]
        raise KproxyError(f"a task failed: {lines[-1].strip()}; nothing was written") from fault
    if summary_view.show(summary, strict=strict):
        sys.exit(1)


COMMANDS = {"ingest": _with(_SPARK, ingest), **{name: _command(name, job) for name, job in JOBS.items()}}
