"""Handling of Ctrl-C (SIGINT): at once while modules are loaded, at a safe point afterwards.

Python's own handler raises KeyboardInterrupt anywhere. During imports that prints a traceback of the import system, and
where C calls Python the exception is lost: pydantic prints "Exception ignored", and kproxy runs on. While there is
nothing to clean up, the system's default action is right.

It is imported before all other modules, so it imports only `signal` and `time`.
"""

import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class EndsAtOnce:
    """A `with` in which SIGINT ends the process as by default; afterwards the former handler is restored.

    No effect where SIGINT is ignored (a script in the background) or has a handler. A handler set inside stays.
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


SAME_S = 1.0  # signals within it are one interrupt: `timeout` signals the process and its group


class ComesLater:
    """A `with` that SIGINT does not interrupt: KeyboardInterrupt is raised at its end, or at once by a second SIGINT.

    For code that starts a process whose pid is only known afterwards. No effect where SIGINT is ignored or has a
    handler, or outside the main thread.
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
        if self._is_ours and signal.getsignal(signal.SIGINT) == self._note:  # a handler set inside stays
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._asked_s and kind is None:
            raise KeyboardInterrupt


class Asks:
    """A `with` in which the first SIGINT only sets `asked`, and a further one raises KeyboardInterrupt.

    It replaces any other handler, such as a library's that would cancel the running work.
    """

    def __init__(self, on_asked: "Callable[[], object]") -> None:
        """on_asked: called by the first SIGINT."""
        self._on_asked = on_asked
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
            self._on_asked()
        elif now_s - self._asked_s >= SAME_S:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
