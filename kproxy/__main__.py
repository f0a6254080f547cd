"""The program `kproxy`, also as `python -m kproxy`: ends at an interrupt without a stack while it is still loaded."""

from kproxy.interrupts import EndsAtOnce


def main() -> None:
    """What the command `kproxy` runs."""
    with EndsAtOnce():
        from kproxy.cli import main as run
    run()


if __name__ == "__main__":
    main()
