"""Changes of one operator, bound or constant each: what tests should notice.

A mutant is a module's source in which one node of its syntax tree is another. Docstrings, annotations, `__slots__`, log
messages and the texts of errors are left alone: no test is about them. Nor is `strict=True` of `zip`: it asserts what
holds for all input, and the module computes the same without it.
"""

import ast
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

_OTHER: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_SAID = {"debug", "info", "warning", "error", "exception", "log"}  # methods of loggers


@dataclass(frozen=True)
class Mutant:
    """One change: the line, what stood there and what stands there now, and the whole source with it."""

    line: int
    before: str
    after: str
    source: str


def count(source: str) -> int:
    """How many mutants a module has: none of them is written, which takes a minute for the whole package."""
    return sum(1 for node in _nodes(ast.parse(source)) for _ in _changes(node))


def mutants(source: str, only: Collection[int] | None = None) -> Iterator[Mutant]:
    """All mutants of a module, or those of these numbers, in the order of its syntax tree."""
    tree = ast.parse(source)
    every = ((node, change) for node in _nodes(tree) for change in _changes(node))
    for number, (node, change) in enumerate(every):
        if only is None or number in only:
            line, before = getattr(node, "lineno", 0), ast.unparse(node)
            undo = change()
            yield Mutant(line, before, ast.unparse(node), ast.unparse(tree))
            undo()


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What is computed when the module runs, parents first."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (_is_text(child) or _asserts(node, child)):
                yield from _nodes(child)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise | ast.Assert):
        return True
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Constant):
            return True
        called = node.value.func if isinstance(node.value, ast.Call) else None
        return isinstance(called, ast.Attribute) and called.attr in _SAID
    targets = node.targets if isinstance(node, ast.Assign) else ()
    return any(isinstance(target, ast.Name) and target.id == "__slots__" for target in targets)


def _asserts(call: ast.AST, keyword: ast.AST) -> bool:
    """Whether this is `strict=True` in a call of `zip`."""
    if not (isinstance(call, ast.Call) and isinstance(keyword, ast.keyword) and keyword.arg == "strict"):
        return False
    return isinstance(call.func, ast.Name) and call.func.id == "zip" and ast.unparse(keyword.value) == "True"


def _changes(node: ast.AST) -> Iterator[Callable[[], Callable[[], None]]]:
    """Each changes the node, and returns what changes it back."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if type(operator) in _OTHER:
                yield lambda place=place, operator=operator: _put(node.ops, place, _OTHER[type(operator)]())
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in _OTHER:
        yield lambda: _set(node, "op", _OTHER[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda: _set(node, "op", ast.UAdd())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda: _set(node, "value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield lambda: _set(node, "value", node.value + 1)


def _put(items: list[ast.cmpop], place: int, other: ast.cmpop) -> Callable[[], None]:
    before, items[place] = items[place], other
    return lambda: items.__setitem__(place, before)


def _set(node: ast.AST, name: str, other: object) -> Callable[[], None]:
    before = getattr(node, name)
    setattr(node, name, other)
    return lambda: setattr(node, name, before)
