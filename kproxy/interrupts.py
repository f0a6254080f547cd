"""Ctrl-C while a program is still loaded: it ends the process at once, without a stack.

Python's own handler raises KeyboardInterrupt wherever the program stands. While modules are imported that is a stack of
the import system, and where C calls Python it is lost: pydantic prints "Exception ignored" and goes on, so that a
kproxy that was to end runs on. Until there is something to clean up, the system's own default is right.

Loaded before all else, so it imports nothing but `signal` and `time`.
"""

import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class EndsAtOnce:
    """A `with` in which SIGINT ends the process as the system does; what it was before comes back after it.

    Not where SIGINT is ignored (a script in the background) or has a handler. One that is set inside stays.
    """

    def __init__(self) -> None:
        self._before: object = None

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        if self._before is signal.default_int_handler and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)


SAME_S = 1.0  # signals so close are one interrupt: `timeout` sends two, to the process and to its group


class ComesLater:
    """A `with` that SIGINT does not cut short: KeyboardInterrupt comes at its end, and at once with a further one.

    For what starts a process that only its own end makes known. Not where SIGINT is ignored or has a handler, nor on
    another thread than the first.
    """

    def __init__(self) -> None:
        self._is_ours = False
        self._asked_s = 0.0  # of the monotonic clock; 0: not yet

    def __enter__(self) -> None:
        import threading

        is_first = threading.current_thread() is threading.main_thread()
        if is_first and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_ours = True

    def _note(self, *_: object) -> None:
        now_s = time.monotonic()
        if self._asked_s and now_s - self._asked_s >= SAME_S:
            raise KeyboardInterrupt
        self._asked_s = self._asked_s or now_s

    def __exit__(self, kind: object, *_: object) -> None:
        if self._is_ours and signal.getsignal(signal.SIGINT) == self._note:  # one that was set inside stays
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._asked_s and kind is None:
            raise KeyboardInterrupt


class Asks:
    """A `with` in which SIGINT only asks for an end: `asked` says so, and a further one raises KeyboardInterrupt.

    Whatever handler there was is put aside, as one of a library that ends what is under way.
    """

    def __init__(self, told: "Callable[[], object]") -> None:
        """told: called when it is asked for."""
        self._told = told
        self._asked_s = 0.0
        self._before: Any = None

    @property
    def asked(self) -> bool:
        return bool(self._asked_s)

    def __enter__(self) -> "Asks":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *_: object) -> None:
        now_s = time.monotonic()
        if not self._asked_s:
            self._asked_s = now_s
            self._told()
        elif now_s - self._asked_s >= SAME_S:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
