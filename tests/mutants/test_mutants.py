"""Mutants are one change each of what a module computes, and running one tells whether its tests notice."""

import ast

import click
import pytest

from tests.mutants.__main__ import sample
from tests.mutants.mutate import count, mutants

MODULE = '''"""Its duty: 1 < 2."""

class It:
    __slots__ = ("a", "b")

    def is_large(self, size: int = 3) -> bool:
        """At least 4 == 4."""
        log.warning("size %d", 5)
        if not size or (self.a + 1) < size <= 7:
            raise ValueError(f"{size} < 8")
        every = zip(self.a, self.b, strict=True), sorted(self.a, reverse=True), zip(self.a, strict=False)
        return True
'''


def test_each_is_one_change_of_what_is_computed():
    found = [(mutant.before, mutant.after) for mutant in mutants(MODULE)]
    whole = "self.a + 1 < size <= 7"
    assert found == [
        ("3", "4"),
        (f"not size or {whole}", f"not size and {whole}"),
        ("not size", "+size"),
        (whole, "self.a + 1 <= size <= 7"),
        (whole, "self.a + 1 < size < 7"),
        ("self.a + 1", "self.a - 1"),
        ("1", "2"),
        ("7", "8"),
        ("True", "False"),  # of sorted: the one of zip is an assertion
        ("False", "True"),
        ("True", "False"),
    ]
    assert count(MODULE) == len(found)
    assert [(mutant.before, mutant.after) for mutant in mutants(MODULE, {2, 8})] == [found[2], found[8]]
    before = ast.unparse(ast.parse(MODULE))
    sources = [mutant.source for mutant in mutants(MODULE)]
    assert len({*sources, before}) == len(sources) + 1
    for source in sources:
        changed = [pair for pair in zip(before.splitlines(), source.splitlines(), strict=True) if pair[0] != pair[1]]
        assert len(changed) == 1, changed


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("kproxy/none.py", "HEAD has no module or folder kproxy/none.py in kproxy/"),
        ("README.md", "HEAD has no module or folder README.md in kproxy/"),
        ("kproxy/notes.md", "HEAD has no module or folder kproxy/notes.md in kproxy/"),
        ("tests", "HEAD has no module or folder tests in kproxy/"),
        ("kproxy/../tests", "HEAD has no module or folder kproxy/../tests in kproxy/"),
        ("kproxy/__init__.py", "kproxy/__init__.py has no operator, bound or constant to change"),
    ],
)
def test_a_path_without_mutants_is_refused(tmp_path, path, said):
    for folder in ("kproxy", "tests"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "README.md").touch()
    (tmp_path / "kproxy/notes.md").touch()
    with pytest.raises(click.UsageError, match=said):
        sample(1, 1, path, tmp_path)
