"""Ctrl-C while a program is still loaded: it ends the process at once, without a stack.

Python's own handler raises KeyboardInterrupt wherever the program stands. While modules are imported that is a stack of
the import system, and where C calls Python it is lost: pydantic prints "Exception ignored" and goes on, so that a
kproxy that was to end runs on. Until there is something to clean up, the system's own default is right.

Loaded before all else, so it imports nothing but `signal`.
"""

import signal


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
