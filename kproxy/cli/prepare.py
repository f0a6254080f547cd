"""`kproxy spark prepare`: Spark's classes are kept, so that later starts take less. See `kproxy.spark.classes`."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import click


@click.command()
def prepare() -> None:
    """Let every later start of Spark on this machine take two thirds of the time, for 190 MB in the cache folder.

    The JVM archives the Java classes that an ingest and a question load, in XDG_CACHE_HOME/kproxy or ~/.cache/kproxy.
    The archive fits one Java and one pyspark: run the command again after installing another. Remove the file to undo
    it.

    \b
    Run it once, for example in an image of a container:
      kproxy spark prepare
    """
    from kproxy.cli.spark import PLANNING, require_pyspark, started

    require_pyspark()

    from kproxy.capture.formats.splits import SPLIT_BYTES
    from kproxy.spark import classes, pipeline, sample, table
    from kproxy.views import progress

    with (
        _sigterm_interrupts(),
        progress.waiting("starting Spark") as says,
        TemporaryDirectory(prefix="kproxy-") as place,
    ):
        folder = Path(place)
        capture = folder / "sample.pcapng"
        sample.write(capture)
        with classes.made() as option:
            session = started("local[2]", (*PLANNING, f"{classes.OPTIONS}={option}"))
            try:
                for name, split_bytes in (("whole", SPLIT_BYTES), ("shared", sample.SPLIT_BYTES)):
                    pipeline.ingest(session, [capture], folder / name, split_bytes=split_bytes, progress=says)
                says("asking a question")
                table(session, str(folder / "whole"), "exchanges").groupBy("api").count().collect()
                says("keeping what was loaded")
            finally:
                classes.end(session)
    kept = classes.archive()
    assert kept is not None
    click.echo(f"{kept}: {kept.stat().st_size / 1e6:,.0f} MB of classes, which Spark starts with from now on")


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Inside, SIGTERM does what SIGINT does, also where SIGINT was ignored: a JVM ends, unfinished files are removed.

    Not at once while the JVM starts (`kproxy.interrupts.ComesLater`): one that pyspark forgets does not end.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    handler(number, frame)
