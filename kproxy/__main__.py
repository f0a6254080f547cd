"""`python -m kproxy`: the command `kproxy`, where its script is not on the path."""

from kproxy.cli import main

if __name__ == "__main__":
    main()
