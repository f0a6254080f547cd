"""Progress of long operations: a bar of bytes, or a line with the current step and the time that it has taken.

It is shown only on standard error, and only if that is a terminal that redraws; it disappears before the answer is
printed.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console

from kproxy.views.terminal import can_redraw, printable

AFTER_S = 1.0  # delay before the line appears: shorter operations need none
REDRAWN_S = 0.2


@contextmanager
def bar(quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """Show a bar with rate and time left. Yields a function of (source, bytes read, total or 0); None if hidden."""
    console = Console(stderr=True)
    if quiet or not can_redraw(console):
        yield None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as shown:

        def advance(source: str, consumed: int, size: int) -> None:
            if source not in tasks:
                tasks[source] = shown.add_task(printable(source), total=size or None)
            shown.update(tasks[source], completed=consumed, total=max(size, consumed) or None)

        yield advance


@contextmanager
def waiting(what: str, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a line with the current step and its duration, if it takes longer than AFTER_S.

    Yields a function that takes the name of the next step.
    """
    texts = [what]
    if quiet or not can_redraw(Console(stderr=True)):
        yield texts.append
        return
    # Duplicate the descriptor: while a JVM starts, standard error is redirected to a file for its log.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w") as terminal:
        is_over = Event()
        shown = Thread(target=_show, args=(Console(file=terminal), texts, is_over), daemon=True)
        shown.start()
        try:
            yield texts.append
        finally:
            is_over.set()
            shown.join()


def _show(console: Console, texts: list[str], is_over: Event) -> None:
    if is_over.wait(AFTER_S):
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(printable(texts[-1]), total=None)
        while not is_over.wait(REDRAWN_S):
            progress.update(task, description=printable(texts[-1]))
