"""Numbers that the docs state: who changes a bound in the code alone, or in the docs alone, is told."""

from tests.project import ROOT


def size(count: int) -> str:
    """Bytes, as the docs write them."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if not count % unit:
            return f"{count // unit} {name}"
    return f"{count} bytes"


def missing(page: str, *said: str) -> list[str]:
    """Which of these phrases the page does not have."""
    text = " ".join((ROOT / "docs" / page).read_text().split())
    return [each for each in said if each not in text]
