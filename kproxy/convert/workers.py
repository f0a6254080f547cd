"""Processes that read captures: started when there is work for them, and ended with us.

Duty: `Workers.each` has a function called with many arguments, and returns what it made of them, in their order. Where
one call fails, and where we are interrupted, the others stop at their next window. What they have read is reported
meanwhile. Memory: that of the processes. Refuses to know what they do.
"""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from threading import Thread
from typing import Any

from kproxy.convert import machine
from kproxy.convert.job import Job
from kproxy.errors import KproxyError

LOOK_S = 0.2  # between two reports

Seen = Callable[[int], None]  # gets the bytes of each window; raises where nobody waits for the result any more
Progress = Callable[[str, int, int], None]
_ours: list[Any] = []  # of a process: the event to stop at, and the queue of bytes that were read


class _Stopped(Exception):
    """Another call failed, or we were interrupted."""


class Workers:
    """At most `most` processes; a context, at whose end they are gone."""

    def __init__(self, most: int) -> None:
        self.most = most
        context = get_context("spawn")
        self._stop, self._read = context.Event(), context.SimpleQueue()
        self._context = context
        self._pool: ProcessPoolExecutor | None = None
        self._waiting: set[Future[Any]] = set()
        self._progress: tuple[str, int, Progress | None] = "", 0, None
        self._bytes = 0

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._pool is not None:
            self._pool.shutdown()

    def watch(self, source: str, size: int, progress: Progress | None) -> None:
        """What is read from now on is of this capture, of so many bytes."""
        self._progress, self._bytes = (source, size, progress), 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a function called with the arguments and a `Seen`."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.most, self._context, _begin, (self._stop, self._read))
        # It starts processes, which Ctrl-C reaches too: until they ignore it, each would tell of it by a stack.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future = self._pool.submit(_call, function, arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._waiting.add(future)
        return future

    def result(self, source: str, future: Future[Any]) -> Any:
        """What a call returned. Raises what it raised; KproxyError if its process is gone."""
        self._wait([future])
        self._waiting.discard(future)
        return _result(source, future)

    def each(self, job: Job, function: Callable[..., Any], work: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What a function makes of each of the arguments. If one call fails, the others are ended, and it raises."""
        futures = [self.submit(function, *arguments) for arguments in work]
        try:
            self._wait(futures)
            if any(future.done() and future.exception() is not None for future in futures):
                self._end()
            failed = [each for each in futures if not each.cancelled() and each.exception() is not None]
            for future in sorted(failed, key=lambda each: isinstance(each.exception(), _Stopped)):
                _result(job.source, future)
            return [future.result() for future in futures]
        finally:
            self._end()

    def _wait(self, futures: Sequence[Future[Any]]) -> None:
        """Until all are done, or one has failed."""
        while True:
            found = wait(futures, LOOK_S, FIRST_EXCEPTION)
            self._report()
            if not found.not_done or any(each.exception() is not None for each in found.done if not each.cancelled()):
                return

    def _end(self) -> None:
        """What runs is stopped, what waits does not begin."""
        left = [future for future in self._waiting if not future.cancel() and not future.done()]
        if left:
            self._stop.set()
            while wait(left, LOOK_S).not_done:
                self._report()
        self._waiting.clear()
        self._stop.clear()
        self._report()

    def _report(self) -> None:
        before = self._bytes
        while not self._read.empty():  # else who writes to it waits
            self._bytes += self._read.get()
        source, size, progress = self._progress
        if progress is not None and self._bytes > before:
            progress(source, min(self._bytes, size), size)


def _result(source: str, future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool:
        raise KproxyError(
            f"{source}, or a capture near it: a worker process ended; was it short of memory? "
            "--processes 1 needs the least"
        ) from None


def _begin(stop: Any, read: Any) -> None:
    """What a process of ours does first: it ends with its parent, whose folder it writes in, and which is asked to."""
    parent = parent_process()
    assert parent is not None
    _ours[:] = stop, read
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    machine.retain()
    Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _call(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    with machine.seldom_collected():
        return function(*arguments, _seen)


def _seen(size: int) -> None:
    stop, read = _ours
    if stop.is_set():
        raise _Stopped
    if size:
        read.put(size)
