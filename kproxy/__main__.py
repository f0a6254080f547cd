"""The program `kproxy`, also as `python -m kproxy`. SIGINT during its imports ends it without a traceback."""

from kproxy.interrupts import EndsAtOnce


def main() -> None:
    """Run the command `kproxy`."""
    with EndsAtOnce():
        from kproxy.cli import main as run
    run()


if __name__ == "__main__":
    main()
