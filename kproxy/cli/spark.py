"""`kproxy spark`: the command line of the jobs and of the pipeline.

Duty: a command per job, made from its function: its options are the function's parameters, its help the docstring.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import click
from pyspark.errors import AnalysisException, PythonException
from pyspark.logger import PySparkLogger

from kproxy.analysis.jobs import JOBS, Job
from kproxy.errors import KproxyError
from kproxy.views import answers

_PARAMETERS: dict[str, tuple[str, dict[str, Any]]] = {
    "by": ("--by", {"metavar": "COLUMN,...", "help": "api, version, broker, client, host, or any column."}),
    "every": ("--every", {"metavar": "TIME", "help": "Also over time, in steps like '10 seconds' or '1 minute'."}),
    "slower_than_ms": ("--slower-than-ms", {"type": float, "metavar": "MS", "help": "In all, from byte to byte."}),
    "top": ("--top", {"type": int, "metavar": "N", "help": "How many, the slowest first."}),
    "kafka": ("--kafka", {"metavar": "RELEASE", "help": "The release to be ready for."}),
    "other": ("--with", {"metavar": "TABLES", "required": True, "help": "The other dataset."}),
}

# The driver of `ingest` plans, and on one machine moves few and large rows: to optimize that costs more than it saves.
_PLANNING = ("spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1", "spark.sql.adaptive.enabled=false")

# To these pyspark logs the whole Java stack of a mistake, as one line of JSON, before it raises what we tell in words.
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


def _session(master: str | None, config: tuple[str, ...]) -> Any:
    from kproxy import spark

    for name in _LOGGERS:
        PySparkLogger.getLogger(name).disabled = True
    settings = dict(setting.partition("=")[::2] for setting in config)
    return spark.session(master, settings)


def _command(name: str, job: Job) -> click.Command:
    parameters = list(inspect.signature(job.run).parameters.values())[len(job.tables) :]

    def run(tables: str, where: str | None, shown: str, out: str | None, limit: int | None, **options: Any) -> None:
        from kproxy import spark

        if (shown == "parquet") != (out is not None):
            raise KproxyError("--format parquet and --out go together: Parquet is written to a folder")
        session = _session(options.pop("master"), options.pop("config"))
        frames = [spark.table(session, tables, table) for table in job.tables]
        arguments = {key: value for key, value in options.items() if value is not None}
        if "by" in arguments:
            arguments["by"] = arguments["by"].replace(",", " ").split()
        if "other" in arguments:
            arguments["other"] = spark.table(session, arguments["other"], job.tables[0])
        try:
            if where is not None:
                frames[0] = frames[0].where(where)
                if "other" in arguments:
                    arguments["other"] = arguments["other"].where(where)
            answers.show(job.run(*frames, **arguments), shown, out, limit)
        except ValueError as fault:
            raise KproxyError(str(fault)) from fault
        except AnalysisException as fault:  # a column or a condition that is not there
            raise KproxyError(str(fault).strip().partition("\n")[0].partition(" SQLSTATE")[0]) from None

    for parameter in parameters:
        flag, settings = _PARAMETERS[parameter.name]
        default = parameter.default
        if default not in (inspect.Parameter.empty, None):
            said = ",".join(default) if isinstance(default, tuple) else f"{default:g}" if default is float else default
            settings = {**settings, "help": f"{settings['help']} Default: {said}."}
        run = click.option(flag, parameter.name, **settings)(run)
    run = click.argument("tables", metavar="TABLES")(_with(_ANSWER, _with(_SPARK, run)))
    text = inspect.getdoc(job.run) or ""
    return click.Command(
        name,
        callback=run,
        params=list(reversed(run.__click_params__)),  # type: ignore[attr-defined]
        help=f"{text}\n\n\b\nExample:\n  kproxy spark {name} tables{job.example}",
        short_help=text.partition("\n")[0].partition(":")[0],
    )


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
    try:
        summary = pipeline.ingest(_session(master, (*_PLANNING, *config)), captures, out, settings, tasks=tasks)
    except PythonException as fault:  # of a task: its last line says what
        lines = [line for line in str(fault).splitlines() if line.strip() and "SQLSTATE" not in line]
        raise KproxyError(f"a task failed: {lines[-1].strip()}; nothing was written") from fault
    if summary_view.show(summary, strict=strict):
        sys.exit(1)


COMMANDS = {"ingest": _with(_SPARK, ingest), **{name: _command(name, job) for name, job in JOBS.items()}}
