"""Compiles a layout into straight-line Python source that writes a message: the counterpart of `plans.py`.

A sliced plan is a generator, for bodies with more elements than one call may write: it yields once per SLICE_ELEMENTS.
Refuses to know the meaning of fields; `codec` does.
"""

import struct
from collections.abc import Callable
from typing import Any

from kproxy.protocol.plans import FIXED, TAGS, TRAILING, Source, join
from kproxy.protocol.schema import Field

NULL_STRING = b"\xff\xff"
NULL_ARRAY = b"\xff\xff\xff\xff"
SLICE_ELEMENTS = 256  # elements that a sliced plan writes between two yields: some tenths of a millisecond


class Write(Source):
    """Source that writes one version of a message: plan(body) -> bytearray.

    A tagged field is written if the dict has it, so that a decoded message is encoded unchanged. Values of a wrong type
    raise Python's own exceptions, which `codec` translates to Malformed.
    """

    def __init__(self, title: str, version: int, flexible: bool, *, sliced: bool = False) -> None:
        super().__init__(title)
        self.version = version
        self.flexible = flexible
        self.sliced = sliced
        self._run: list[tuple[str, str]] = []

    def settle(self) -> None:
        """Emit the write of the current run of fixed-size values."""
        if self._run:
            layout = ">" + "".join(code for code, _ in self._run)
            name = "pack_" + layout[1:].replace("?", "t")
            self.names[name] = struct.Struct(layout).pack
            self.line(f"out += {name}({', '.join(value for _, value in self._run)})")
            self._run.clear()

    def struct(self, fields: tuple[Field, ...], body: str, path: str) -> None:
        reserved = ([TAGS] if self.flexible else []) + ([] if path else [TRAILING])
        names = self.constant("names", frozenset((*(field.name for field in fields), *reserved)))
        with self.block(f"if not {body}.keys() <= {names}:"):
            text = f"{self.title}: {path or 'the top level'} has no "
            self.line(f"raise Malformed({text!r} + ', '.join(sorted({body}.keys() - {names})))")
        present = [field for field in fields if self.version in field.versions]
        for field in present:
            if self.version not in field.tagged_versions:
                default = self.constant("default", field.default)
                self.field(field, f"{body}.get({field.name!r}, {default})", join(path, field.name))
        self.settle()
        if self.flexible:
            self.tags([field for field in present if self.version in field.tagged_versions], body, path)

    def tags(self, tagged: list[Field], body: str, path: str) -> None:
        tags = self.fresh("tags")
        self.line(f"{tags} = dict({body}.get({TAGS!r}, ()))")
        outer = self.fresh("outer")
        for field in tagged:
            with self.block(f"if {field.name!r} in {body}:"):
                self.line(f"{outer} = out")
                self.line("out = bytearray()")
                self.field(field, f"{body}[{field.name!r}]", join(path, field.name))
                self.settle()
                self.line(f"{tags}[{field.tag}] = out")
                self.line(f"out = {outer}")
        self.line(f"out += write_uvarint(len({tags}))")
        with self.block(f"for tag in sorted({tags}):"):
            self.line(f"out += write_uvarint(tag) + write_uvarint(len({tags}[tag])) + {tags}[tag]")

    def field(self, field: Field, value: str, path: str) -> None:
        nullable = self.version in field.nullable_versions
        compact = self.flexible and field.compactable
        if field.type in FIXED:
            self.take(field.type, value)
            return
        self.settle()
        var = self.fresh("v")
        self.line(f"{var} = {value}")
        with self.block(f"if {var} is None:"):
            if not nullable:
                self.line(f"raise Malformed({f'{self.title}: {path} must not be null'!r})")
            elif field.is_struct and not field.is_array:
                self.line(f"out.append({0 if self.version in field.tagged_versions else 255})")
            elif compact:
                self.line("out.append(0)")
            else:
                self.line(f"out += {NULL_STRING if field.type == 'string' else NULL_ARRAY!r}")
        with self.block("else:"):
            if field.is_array:
                self.line(f"if isinstance({var}, no_lists): raise TypeError")  # these are iterable too
                self.length(var, compact, "i")
                with self.block(f"for {var}x in {var}:"):
                    self.element(field, f"{var}x", path, compact)
                    if self.sliced:
                        self.line("written += 1")
                        self.line(f"if not written % {SLICE_ELEMENTS}: yield")
            elif field.is_struct:
                if nullable:
                    self.line("out.append(1)")
                self.struct(field.fields, var, path)
            else:
                self.sized(field.type, var, compact)
            self.settle()

    def element(self, field: Field, value: str, path: str, compact: bool) -> None:
        if field.element_type in FIXED:
            self.take(field.element_type, value)
        elif field.is_struct:
            self.struct(field.fields, value, path)
        else:
            self.sized(field.element_type, value, compact)
        self.settle()

    def take(self, type_: str, value: str) -> None:
        self._run.append((FIXED[type_], f"{value}.bytes" if type_ == "uuid" else value))

    def sized(self, type_: str, value: str, compact: bool) -> None:
        if type_ == "string":
            self.line(f"b = {value}.encode()")
            value = "b"
        self.length(value, compact, "h" if type_ == "string" else "i")
        self.line(f"out += {value}")

    def length(self, value: str, compact: bool, code: str) -> None:
        if compact:
            self.line(f"out += write_uvarint(len({value}) + 1)")
        else:
            self._run.append((code, f"len({value})"))
            self.settle()

    def plan(self, fields: tuple[Field, ...]) -> Callable[[dict[str, Any]], bytearray]:
        self.names["no_lists"] = (str, bytes, dict)
        self.line("out = bytearray()")
        if self.sliced:
            self.line("written = 0")
        self.struct(fields, "body", "")
        self.line(f"out += body.get({TRAILING!r}, b'')")
        self.line("return out")
        return self.function("body")
