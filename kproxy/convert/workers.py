"""Processes that read captures: started when there is work for them, and ended with this process.

Duty: `Workers.each` calls a function with many arguments, and returns the results in their order. If one call fails, or
if this process is interrupted, the other calls stop at their next window. Progress is reported meanwhile. Memory: that
of the processes.
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

LOOK_S = 0.2  # interval of reports

Seen = Callable[[int], None]  # receives the bytes of each window; raises if the call is to stop
Progress = Callable[[str, int, int], None]
_ours: list[Any] = []  # in a worker: the stop event, and the queue of bytes read


class _Stopped(Exception):
    """Another call failed, or the parent was interrupted."""


class Workers:
    """At most `most` processes; a context manager, at whose end they have ended."""

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
        """Report bytes read from now on as progress of this capture. size: its bytes."""
        self._progress, self._bytes = (source, size, progress), 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in a worker, with the arguments and a `Seen`; returns its future."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.most, self._context, _begin, (self._stop, self._read))
        # Ctrl-C also reaches new processes: until they ignore it, each would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future = self._pool.submit(_call, function, arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._waiting.add(future)
        return future

    def result(self, source: str, future: Future[Any]) -> Any:
        """Return the result of a call, or raise its exception; KproxyError if its process has died."""
        self._wait([future])
        self._waiting.discard(future)
        return _result(source, future)

    def each(self, job: Job, function: Callable[..., Any], work: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return a function's results for each of the arguments; the first failure stops the others and is raised."""
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
        """Wait until all calls are done, or one has failed; report progress."""
        while True:
            found = wait(futures, LOOK_S, FIRST_EXCEPTION)
            self._report()
            if not found.not_done or any(each.exception() is not None for each in found.done if not each.cancelled()):
                return

    def _end(self) -> None:
        """Stop running calls, and cancel queued ones."""
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
        while not self._read.empty():  # a full queue would block the workers
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
    """Initialise a worker: it ignores Ctrl-C, which the parent handles, and ends if the parent dies."""
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
