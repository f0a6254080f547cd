"""What a terminal can do, and text that does nothing to it."""

import os

from rich.console import Console


def can_redraw(console: Console) -> bool:
    """Whether screens and progress bars may be drawn: a terminal that moves its cursor, and a user who wants that.

    TERM=dumb says that it cannot; NO_COLOR, that plain text is wanted.
    """
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """Text with names of files or from the wire in it: nothing in it moves the cursor."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
