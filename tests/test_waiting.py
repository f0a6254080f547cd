"""Tests wait for events: how many pauses are left that no condition ends, so that their number does not grow."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import RING_2
from tests.project import ROOT

MOST = 39  # pauses in files of ring 1: peers that are slow, clocks that must go on, silence for a moment
SEARCHES = ("chaos", "incident", "knowledge", "dashboards")  # their time is that of what they imitate


def _pauses(node: ast.AST, polls: bool = False) -> Iterator[int]:
    """The lines of calls of sleep outside of `while`; sleep(0) only lets others have their turn."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and not polls:
            name, given = ast.unparse(child.func).rpartition(".")[2], [*map(ast.unparse, child.args)]
            if name == "sleep" and given not in ([], ["0"]):
                yield child.lineno
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _pauses(child)
        else:
            yield from _pauses(child, polls or isinstance(child, ast.While))


def _is_in_ring_1(path: Path) -> bool:
    place = path.relative_to(ROOT).as_posix()
    searches = any(place.startswith(f"tests/{name}/") for name in SEARCHES)
    return not searches and not any(place == each or place.startswith(f"{each}/") for each in RING_2)


def test_what_is_a_pause():
    text = """
async def test():
    await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    while not found:
        time.sleep(0.1)
    for _ in range(3):
        sleep(1)
"""
    assert list(_pauses(ast.parse(text))) == [4, 8]


def test_pauses_do_not_become_more():
    """A new one? Wait for what you assert (CONTRIBUTING.md). One less? Write the new number at the top."""
    files = filter(_is_in_ring_1, sorted((ROOT / "tests").rglob("*.py")))
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in _pauses(ast.parse(path.read_text()))]
    assert len(found) <= MOST, "\n".join(found)
