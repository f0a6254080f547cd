"""The progress bar of `kproxy convert`. Refuses to know what is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kproxy.views.terminal import can_redraw, printable


@contextmanager
def bar() -> Iterator[Any]:
    """A progress bar on standard error, with rate and time left; none where that is no terminal that redraws."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not can_redraw(console)) as shown:

        def advance(source: str, consumed: int, size: int) -> None:
            if source not in tasks:
                tasks[source] = shown.add_task(printable(source), total=size or None)
            shown.update(tasks[source], completed=consumed, total=max(size, consumed) or None)

        yield advance
