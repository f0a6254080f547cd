"""Abilities of a terminal, and text without control characters."""

import os

from rich.console import Console


def can_redraw(console: Console) -> bool:
    """Return whether screens and progress bars may be drawn: on a terminal, without TERM=dumb and NO_COLOR.

    TERM=dumb means that the cursor cannot move, NO_COLOR that the user wants plain text.
    """
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR")


def printable(text: str) -> str:
    """Return text with unprintable characters escaped: names of files and text from the wire cannot move the cursor."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
