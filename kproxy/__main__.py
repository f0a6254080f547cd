"""The program `kproxy`, also as `python -m kproxy`: ends at an interrupt without a stack while it is still loaded."""

import signal


def main() -> None:
    """What the command `kproxy` runs."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not where a script in the background has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kproxy.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
