"""What is shown while something takes its time: a bar of bytes, or what is waited for and since when.

On standard error, where that is a terminal that redraws, and nowhere else; it is gone when the answer is printed.
Refuses to know what is read or asked.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console

from kproxy.views.terminal import can_redraw, printable

AFTER_S = 1.0  # what is done sooner needs no progress
REDRAWN_S = 0.2


@contextmanager
def bar(quiet: bool = False) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar with rate and time left; gives what is called with (source, bytes read, bytes in all or 0), if any."""
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
    """A line that says what is waited for and for how long, once it has taken longer than a second.

    Gives what is called with the next thing that is waited for.
    """
    said = [what]
    if quiet or not can_redraw(Console(stderr=True)):
        yield said.append
        return
    # A descriptor of its own: while a JVM starts, standard error is a file that keeps its log.
    with os.fdopen(os.dup(sys.stderr.fileno()), "w") as terminal:
        is_over = Event()
        shown = Thread(target=_show, args=(Console(file=terminal), said, is_over), daemon=True)
        shown.start()
        try:
            yield said.append
        finally:
            is_over.set()
            shown.join()


def _show(console: Console, said: list[str], is_over: Event) -> None:
    if is_over.wait(AFTER_S):
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(printable(said[-1]), total=None)
        while not is_over.wait(REDRAWN_S):
            progress.update(task, description=printable(said[-1]))
