"""Compiles a layout into straight-line Python source, once per message, version and purpose.

`Walk` holds the grammar of the wire: lengths, nulls, arrays, tag sections. Reading, scanning, locating and reading a
prefix share it and differ only in the values that they keep, so they all end at the same byte.

The interpreter's cost is per operation, so the source has few of them. Adjacent fields of fixed size become one
`unpack_from`, which also reads the first byte of the varint after them. One-byte varints are read in place. Bounds are
not checked per field: reading past the buffer raises and is translated once, and a position past `end` is found at the
end. Checked at once is only what could cause unbounded work or memory: a count must fit into the bytes left, a position
never moves back, and no slice reaches beyond `end`.

A plan can be made as a generator (`sliced`), for bodies with more elements than one call may read: it yields once per
SLICE_BYTES, and ends with what the plan would return.

Refuses to know the meaning of fields; `codec` does.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from kproxy.errors import Malformed
from kproxy.protocol.primitives import read_uvarint, skip_tags, write_uvarint
from kproxy.protocol.schema import Field

TAGS = "_tags"  # the key of the unknown tagged fields of a struct: {tag: bytes}
TRAILING = "_trailing"  # the key of the bytes after a body

# Bytes that a sliced plan reads between two yields: some tenths of a millisecond.
SLICE_BYTES = 2 * 1024

FIXED = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}


@lru_cache(4096)
def uuid_of(data: bytes) -> UUID:
    """Cached: most are topic ids, which repeat, and making a UUID costs as much as reading a small body."""
    return UUID(bytes=data)


def size_of(code: str) -> int:
    return struct.calcsize(">" + code)


class Source:
    """The lines of a generated function, and the names that they refer to."""

    # True: a generator. In a walk, `mark` is the position of its next yield; code that sets `pos` sets it too.
    sliced = False

    def __init__(self, title: str) -> None:
        self.title = title  # the message's, for faults
        self.names: dict[str, Any] = {
            "Malformed": Malformed,
            "uuid_of": uuid_of,
            "skip_tags": skip_tags,
            "struct_error": struct.error,
            "unpack_from": struct.unpack_from,
            "uvarint": read_uvarint,
            "write_uvarint": write_uvarint,
        }
        self.lines: list[str] = []
        self.hoisted: list[str] = []
        self._depth = 1
        self._serial = 0

    def line(self, text: str) -> None:
        self.lines.append("    " * self._depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(head)
        self._depth += 1
        yield
        self._depth -= 1

    def fresh(self, stem: str) -> str:
        self._serial += 1
        return f"{stem}{self._serial}"

    def unpacker(self, layout: str) -> str:
        """The name of the layout's bound `unpack_from`, passed as a default argument because locals are fast."""
        name = "unpack_" + layout[1:].replace("?", "t")
        if name not in self.names:
            self.names[name] = struct.Struct(layout).unpack_from
            self.hoisted.append(name)
        return name

    def constant(self, stem: str, value: Any) -> str:
        name = self.fresh(stem)
        self.names[name] = value
        return name

    def fault(self, condition: str, text: str) -> None:
        with self.block(f"if {condition}:"):
            self.line(f"raise Malformed({f'{self.title}: {text}'!r})")

    def function(self, arguments: str) -> Callable[..., Any]:
        hoisted = "".join(f", {name}={name}" for name in self.hoisted)
        generator = ("    if False: yield",) if self.sliced else ()  # required if no statement yields
        source = "\n".join((f"def plan({arguments}{hoisted}):", *generator, *self.lines))
        exec(compile(source, f"<{self.title}>", "exec"), self.names)
        plan: Callable[..., Any] = self.names["plan"]
        return plan


class Length(NamedTuple):
    """A length or count as read from the wire. A compact one is the real length plus one; 0 means null."""

    var: str
    compact: bool

    @property
    def real(self) -> str:
        return f"{self.var} - 1" if self.compact else self.var

    @property
    def is_null(self) -> str:
        return f"not {self.var}" if self.compact else f"{self.var} < 0"

    @property
    def is_some(self) -> str:
        return f"{self.var} > 1" if self.compact else f"{self.var} > 0"


class Walk(Source):
    """Source that walks one version of a message, with the variables `buffer`, `pos` and `end`.

    Fields that are not at or above one of the wanted paths are skipped. A path is field names joined by dots; a path
    that ends in [] means the elements of an array.
    """

    utf8 = "strict"
    walks_all_tags = False  # False: a tag section without wanted fields is skipped by one call
    # True: each tagged field is read by its content, like brokers do, must have its stated size, and be in order.
    strict_tags = False

    def __init__(self, title: str, version: int, flexible: bool, wanted: Iterable[str] = ()) -> None:
        super().__init__(title)
        self.version = version
        self.flexible = flexible
        self.wanted = frozenset(wanted)
        self._above = {above for path in self.wanted for above in _self_and_above(path)}
        self._run: list[tuple[str, str | None]] = []
        self._after: list[str] = []

    # Overridden per purpose.

    def keeps(self, path: str) -> bool:
        """Whether the field's own value goes into a variable."""
        return path in self.wanted

    def looks_below(self, path: str) -> bool:
        """Whether anything at this path or below it is wanted."""
        return path.removesuffix("[]") in self._above

    def kept(self, field: Field, path: str, var: str) -> None:
        """`var` holds the value once the run is settled; add lines for that moment by `after`."""

    def counted(self, path: str, length: Length) -> None:
        """An array's length was read."""

    def before(self, path: str) -> None:
        """`pos` is about to be at the first byte of the field, or of an element (the path ends in [])."""

    def behind(self, path: str) -> None:
        """The field, or the element, has been walked."""

    def tags_counted(self, count: str) -> None:
        """The variable holds how many tagged fields a struct has."""

    def tag_read(self, path: str, tag: str) -> None:
        """The variable `tag` holds a tag of the struct at the path; `pos` is after it."""

    def tag_sized(self, start: str) -> None:
        """The size of a tagged field lies between `start` and `pos`."""

    def members(self, values: dict[str, str]) -> str | None:
        """The untagged fields of a struct have been walked; returns the variable that holds the struct."""
        return None

    # Positions, in a form that stays valid when the buffer is replaced (streamed bodies).

    here = "pos"

    def go_to(self, place: str) -> None:
        self.line(f"pos = {place}")

    # Runs of fixed size.

    def take(self, code: str, var: str | None = None) -> None:
        self._run.append((code, var))

    def after(self, line: str) -> None:
        """Add a line that runs once the current run has been read."""
        self._after.append(line)

    def settle(self) -> None:
        """Emit the read of the current run; `pos` is then after everything that was taken."""
        size = sum(size_of(code) for code, _ in self._run)
        if any(var for _, var in self._run):
            self.need(size)
        wanted: list[tuple[str, str]] = []
        layout = ">"
        skipped = offset = 0
        for code, var in self._run:
            if var is None:
                skipped += size_of(code)
            else:
                layout += (f"{skipped}x" if skipped else "") + code
                offset += skipped
                wanted.append((code, var))
                if len(wanted) == 1:
                    first = offset
                offset += size_of(code)
                skipped = 0
        if len(wanted) == 1 and wanted[0][0] == "B":
            self.line(f"{wanted[0][1]} = buffer[pos{f' + {first}' if first else ''}]")
        elif wanted:
            self.line(f"{', '.join(var for _, var in wanted)}, = {self.unpacker(layout)}(buffer, pos)")
        if size:
            self.line(f"pos += {size}")
        for line in self._after:
            self.line(line)
        self._run.clear()
        self._after.clear()

    def end_slice(self) -> None:
        """`pos` is after an element: yield if a slice has been read."""
        if self.sliced:
            with self.block("if pos > mark:"):
                self.line(f"mark = pos + {SLICE_BYTES}")
                self.line("yield")

    # The grammar.

    def need(self, size: int | str) -> None:
        """Called before `size` bytes are read."""

    def short(self, condition: str) -> None:
        """Raise if a length claims more bytes than are left."""
        with self.block(f"if {condition}:"):
            self.cut()

    def cut(self) -> None:
        text = f"{self.title}: cut short: it does not end within its "
        self.line(f"raise Malformed({text!r} + f'{{end - start}} bytes') from None")

    def length(self, compact: bool, code: str, nullable: bool, path: str) -> Length:
        length = Length(self.fresh("n"), compact)
        if compact:
            self.uvarint(length.var)
        else:
            self.take(code, length.var)
            self.settle()
        if not nullable:
            self.fault(length.is_null, f"{path} must not be null")
        return length

    def uvarint(self, var: str) -> None:
        self.take("B", var)
        self.settle()
        self.rest_of_uvarint(var)

    def rest_of_uvarint(self, var: str) -> None:
        """Read the rest of a varint whose first byte is in `var`; `pos` is after that byte."""
        with self.block(f"if {var} > 127:"):
            # Lengths of records take two bytes, which are read in place: a call costs four times as much.
            self.line("byte = buffer[pos]")
            self.line(f"if byte < 128: {var}, pos = {var} + (byte << 7) - 128, pos + 1")
            self.line(f"else: {var}, pos = uvarint(buffer, pos - 1)")

    def struct(self, fields: tuple[Field, ...], path: str) -> str | None:
        values = {}
        present = [field for field in fields if self.version in field.versions]
        for field in present:
            if self.version not in field.tagged_versions:
                values[field.name] = self.field(field, join(path, field.name))
        var = self.members({name: value for name, value in values.items() if value is not None})
        if self.flexible:
            self.tags([field for field in present if self.version in field.tagged_versions], path, var)
        return var

    def field(self, field: Field, path: str) -> str | None:
        nullable = self.version in field.nullable_versions
        compact = self.flexible and field.compactable
        self.before(path)
        if field.is_array:
            value = self.array(field, path, compact, nullable)
        elif field.is_struct:
            value = self.nullable_struct(field, path) if nullable else self.struct(field.fields, path)
        else:
            value = self.primitive(field, field.type, path, compact, nullable)
        self.behind(path)
        return value

    def primitive(self, field: Field, type_: str, path: str, compact: bool, nullable: bool) -> str | None:
        var = self.fresh("v") if self.keeps(path) else None
        if type_ in FIXED:
            self.take(FIXED[type_], var)
            if var and type_ == "uuid":
                self.after(f"{var} = uuid_of({var})")
        else:
            length = self.length(compact, "h" if type_ == "string" else "i", nullable, path)
            if var:
                self.content(var, type_, length, nullable)
            elif nullable:
                with self.block(f"if {length.is_some}:"):
                    self.line(f"pos += {length.real}")
            else:
                self.line(f"pos += {length.real}")
        if var:
            self.kept(field, path, var)
        return var

    def content(self, var: str, type_: str, length: Length, nullable: bool) -> None:
        if nullable:
            self.line(f"{var} = None")
            with self.block(f"if not ({length.is_null}):"):
                self._content(var, type_, length)
        else:
            self._content(var, type_, length)

    def _content(self, var: str, type_: str, length: Length) -> None:
        self.need(length.real)
        self.line(f"stop = pos + {length.real}")
        self.short("stop > end")
        if type_ == "string":
            self.line(f"{var} = str(buffer[pos:stop], 'utf-8', {self.utf8!r})")
        else:
            self.line(f"{var} = bytes(buffer[pos:stop])")
        self.line("pos = stop")

    def nullable_struct(self, field: Field, path: str) -> str | None:
        marker = self.fresh("m")
        self.take("b", marker)
        self.settle()
        var = self.fresh("s") if self.keeps(path) else None
        if var:
            self.line(f"{var} = None")
        # kafka-clients write the null of a tagged struct as 0, like every compact null, and not as -1.
        with self.block(f"if {marker} {'>' if self.version in field.tagged_versions else '>='} 0:"):
            value = self.struct(field.fields, path)
            self.settle()
            self.line(f"{var} = {value}" if var else "pass")
        return var

    def array(self, field: Field, path: str, compact: bool, nullable: bool) -> str | None:
        length = self.length(compact, "i", nullable, path)
        self.counted(path, length)
        element = path + "[]"
        type_ = field.element_type
        var = self.fresh("a") if self.keeps(path) else None
        size = self.fixed_size(field, type_)
        if size is not None and not (var or self.looks_below(element)):
            with self.block(f"if {length.is_some}:"):
                self.line(f"pos += ({length.real}) * {size}")
            return None
        self.short(f"({length.real}) * {max(self.least_size(field, type_), 1)} > end - pos")
        if var:
            self.line(f"{var} = None if {length.is_null} else []" if nullable else f"{var} = []")
        if var and type_ in FIXED and type_ != "uuid":
            with self.block(f"if {length.is_some}:"):
                self.line(f"{var} = list(unpack_from(f'>{{{length.real}}}{FIXED[type_]}', buffer, pos))")
                self.line(f"pos += ({length.real}) * {size}")
            return var
        with self.block(f"while {length.is_some}:"):
            self.line(f"{length.var} -= 1")
            self.before(element)
            if type_ in FIXED or not field.is_struct:
                value = self.primitive(field, type_, element, compact, False)
            else:
                value = self.struct(field.fields, path)
            self.settle()
            self.behind(element)
            if var:
                self.line(f"{var}.append({value})")
            self.end_slice()
        return var

    def tags(self, tagged: list[Field], path: str, var: str | None) -> None:
        looked_at = [field for field in tagged if self.strict_tags or self.looks_below(join(path, field.name))]
        count = self.fresh("t")
        self.take("B", count)
        self.settle()
        with self.block(f"if {count}:"):
            if not (looked_at or self.walks_all_tags or self.strict_tags or self.sliced):
                self.line("pos = skip_tags(buffer, pos - 1, end)")
            else:
                self.rest_of_uvarint(count)
                self.short(f"{count} * 2 > end - pos")
                self.tags_counted(count)
                self.tag_loop(count, looked_at, path, var)

    def tag_loop(self, count: str, looked_at: list[Field], path: str, var: str | None) -> None:
        tag, start, size, stop, last = (self.fresh(stem) for stem in ("tag", "start", "size", "stop", "last"))
        if self.strict_tags:
            self.line(f"{last} = -1")
        with self.block(f"while {count}:"):
            self.line(f"{count} -= 1")
            self.uvarint(tag)
            if self.strict_tags:
                self.fault(f"{tag} <= {last}", f"tagged fields of {path or 'the top level'} twice or out of order")
                self.line(f"{last} = {tag}")
            self.tag_read(path, tag)
            self.line(f"{start} = pos")
            self.uvarint(size)
            self.line(f"{stop} = {self.here} + {size}")
            self.short(f"{stop} > end")
            word = "if"
            for field in looked_at:
                with self.block(f"{word} {tag} == {field.tag}:"):
                    self.tag_content(field, join(path, field.name), start, stop, var)
                word = "elif"
            if looked_at:
                with self.block("else:"):
                    self.unknown(var, tag, stop)
            else:
                self.unknown(var, tag, stop)
            self.end_slice()

    def tag_content(self, field: Field, path: str, start: str, stop: str, var: str | None) -> None:
        self.tag_sized(start)
        value = self.field(field, path)
        self.settle()
        self.fault(f"{self.here} != {stop}", f"tagged field {path} does not end where its size says")
        if var:
            self.fault(f"{field.name!r} in {var}", f"tagged field {path} is there twice")
            self.line(f"{var}[{field.name!r}] = {value}")

    def unknown(self, var: str | None, tag: str, stop: str) -> None:
        if var:
            unknown = f"{var}.setdefault({TAGS!r}, {{}})"
            self.fault(f"{tag} in {unknown}", "an unknown tagged field is there twice")
            self.line(f"{unknown}[{tag}] = bytes(buffer[pos:{stop}])")
        self.go_to(stop)

    # Sizes in this version.

    def fixed_size(self, field: Field, type_: str) -> int | None:
        """Return the common size of all values of the type, or None if sizes vary."""
        if type_ in FIXED:
            return size_of(FIXED[type_])
        if type_ in ("string", "bytes", "records") or self.flexible:
            return None
        total = 0
        for inner in field.fields:
            if self.version in inner.versions:
                size = self.fixed_size(inner, inner.type)
                if size is None or inner.is_array or self.version in inner.nullable_versions:
                    return None
                total += size
        return total

    def least_size(self, field: Field, type_: str) -> int:
        """Return the smallest size of a value of the type."""
        if type_ in FIXED:
            return size_of(FIXED[type_])
        compact = self.flexible and field.compactable
        if type_.startswith("[]") or type_ in ("bytes", "records"):
            return 1 if compact else 4
        if type_ == "string":
            return 1 if compact else 2
        return int(self.flexible) + sum(
            1
            if inner.is_struct and not inner.is_array and self.version in inner.nullable_versions
            else self.least_size(inner, inner.type)
            for inner in field.fields
            if self.version in inner.versions and self.version not in inner.tagged_versions
        )


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _self_and_above(path: str) -> Iterator[str]:
    names = path.removesuffix("[]").split(".")
    for count in range(1, len(names) + 1):
        yield ".".join(names[:count])
