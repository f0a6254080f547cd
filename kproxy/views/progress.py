"""What is shown while something takes its time: a bar of bytes, or what is waited for and since when.

On standard error, where that is a terminal that redraws, and nowhere else; it is gone when the answer is printed.
Refuses to know what is read or asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from rich.console import Console

from kproxy.views.terminal import can_redraw, printable

AFTER_S = 1.0  # what is done sooner needs no progress


@contextmanager
def bar(quiet: bool = False) -> Iterator[Any]:
    """A bar with rate and time left; gives what is called with (source, bytes read, bytes in all or 0)."""
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
    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=quiet or not can_redraw(console)) as shown:

        def advance(source: str, consumed: int, size: int) -> None:
            if source not in tasks:
                tasks[source] = shown.add_task(printable(source), total=size or None)
            shown.update(tasks[source], completed=consumed, total=max(size, consumed) or None)

        yield advance


@contextmanager
def waiting(what: str, quiet: bool = False) -> Iterator[None]:
    """A line that says what is waited for and for how long, once it has taken longer than a second."""
    console = Console(stderr=True)
    if quiet or not can_redraw(console):
        yield
        return
    is_over = Event()
    shown = Thread(target=_show, args=(console, what, is_over), daemon=True)
    shown.start()
    try:
        yield
    finally:
        is_over.set()
        shown.join()


def _show(console: Console, what: str, is_over: Event) -> None:
    if is_over.wait(AFTER_S):
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(printable(what), total=None)
        is_over.wait()
