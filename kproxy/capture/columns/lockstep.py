"""Many bodies of one API and version, read in parallel: each field of all of them in one step.

Duty: the fields that `wire.bodies` reads of a body, for thousands of bodies at once, by column. The steps are the
schema's, in the order of the wire, each body at its own position; so bodies may differ in size, not in kind. Rare
bodies are not read here and marked `left`: those with tagged fields, message sets and cut batches, errors inside,
undecodable bytes, or more than MOST elements of an array. A body whose bytes are not all available is marked `short`.

The same fields, with the same meaning, as `bodies.Wanted` gives to the other readers; a property holds them together.
Memory: a few columns of the bodies. Refuses to know frames and pairing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from uuid import UUID

import numpy as np

from kproxy.protocol.apis import API_VERSIONS, LIST_OFFSETS
from kproxy.protocol.plans import FIXED, join, size_of, uuid_of
from kproxy.protocol.records import CODEC, CONTROL, HEADER_BYTES, LEAST_LENGTH, V2, BatchHeader
from kproxy.protocol.schema import Field, schema
from kproxy.wire.bodies import BLANK, MAX_TEXT, NONE, RACK_ID, REPLICA_ID, Partition, Wanted
from kproxy.wire.bulk import NULL, Bodies
from kproxy.wire.structures import joined, picked, taken

MOST = 64  # elements of an array, or batches of a partition: each takes a round of steps,
ABREAST = 16  # which this many bodies must take together,
ALONE = 4  # unless it is one of the first
FEW_TOPICS = 16  # up to so many topics take one step each; more are looked up row by row

_NUMPY = {"?": "u1", "b": "i1", "h": ">i2", "H": ">u2", "i": ">i4", "I": ">u4", "q": ">i8", "d": ">f8", "16s": "V16"}
_HEADER = np.dtype([(name, _NUMPY[code]) for name, code in zip(BatchHeader._fields, V2.format[1:], strict=True)])
_TEXTS = ("topic", "topic_id", "group_id", "metadata")
_NUMBERS = tuple(name for name in Partition._fields if name not in _TEXTS)
_CARRIED = ("bytes", "batches", "records", "codecs", "magic", "first_offset", "last_offset", "max_timestamp")
_TEXT_BITS = 16  # a text is where it begins, and in the lowest bits how long it is; null is -1

Seat = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # of positions: see `Lockstep.read`


@dataclass(slots=True)
class Read:
    """What was read: a value for each body, and rows for its topic-partitions."""

    left: np.ndarray  # bodies that someone else must read
    short: np.ndarray  # bodies whose end is beyond the available bytes
    throttle_ms: np.ndarray  # NONE: there is no such field
    error_code: np.ndarray  # the top level's; NULL: there is no such field
    replica_id: np.ndarray  # of the broker that asks; NONE: a client does
    has_rack: np.ndarray  # 1: a Fetch request names its rack
    bodies: Bodies | None


@cache
def reader(api_key: int, version: int, side: str, detail: int) -> "Lockstep | None":
    """The reader of bodies of this API and version; None if they have to be read one by one."""
    if api_key == API_VERSIONS:  # whose answers may be of another version
        return None
    if api_key == LIST_OFFSETS and side == "request" and detail:  # no column has the timestamps that it asks for
        return None
    found = Lockstep(api_key, version, side, detail)
    return None if side == "response" and (found.wanted.named or found.wanted.statements) else found


class Lockstep:
    """Reads the bodies of one API, version and side, from behind the correlation id."""

    def __init__(self, api_key: int, version: int, side: str, detail: int) -> None:
        self.wanted = wanted = Wanted(api_key, version, side, detail)
        self.side = side
        self.version = version
        self.flexible = version in wanted.message.flexible_versions
        header = schema().data["RequestHeader" if side == "request" else "ResponseHeader"]
        names = [each.name for each in header.fields]
        self.header = header.fields[names.index("correlationId") + 1 :]
        self.header_version = wanted.message.header_version(version)
        self.header_flexible = self.header_version in header.flexible_versions

    def read(
        self,
        data: np.ndarray,
        start: np.ndarray,
        limit: np.ndarray,
        end: np.ndarray,
        shift: np.ndarray | int = 0,
        seat: Seat | None = None,
    ) -> Read:
        """Bodies from `start` to `end`, whose bytes up to `limit` lie by `shift` further in `data`.

        seat: returns the shift and the limit of the bytes at some positions.
        """
        shifts = np.broadcast_to(shift, start.shape).copy()
        return _Reading(self, data, start, limit, end, shifts, seat).read()


@dataclass(slots=True)
class _Cursor:
    """The positions in some of the bodies, and the fields read around them, by name."""

    who: np.ndarray  # which of the bodies
    pos: np.ndarray
    limit: np.ndarray  # up to here their bytes are at hand,
    shift: np.ndarray  # so much further in the data
    around: dict[str, np.ndarray]

    @property
    def at(self) -> np.ndarray:
        """Where in the bytes they stand."""
        at: np.ndarray = self.pos + self.shift
        return at

    def back(self, which: np.ndarray, inside: "_Cursor") -> None:
        """Some of the bodies went on."""
        self.pos[which], self.limit[which], self.shift[which] = inside.pos, inside.limit, inside.shift

    def some(self, which: np.ndarray) -> "_Cursor":
        around = {name: column[which] for name, column in self.around.items()}
        return _Cursor(self.who[which], self.pos[which], self.limit[which], self.shift[which], around)


class _Reading:
    """One walk over bodies."""

    def __init__(
        self,
        plan: Lockstep,
        data: np.ndarray,
        start: np.ndarray,
        limit: np.ndarray,
        end: np.ndarray,
        shift: np.ndarray,
        seat: Seat | None,
    ) -> None:
        self._plan = plan
        self._wanted = plan.wanted
        self._version = plan.version
        self._flexible = plan.flexible
        self._data = data
        self._end = end
        self._seat = seat
        self._at = _Cursor(np.arange(len(start)), start.copy(), limit.copy(), shift, {})
        self._left = np.zeros(len(start), bool)
        self._short = np.zeros(len(start), bool)
        self._dead = False  # some are left, or short
        self._rows: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self._batches: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # who, row, header
        self._row = 0

    def read(self) -> Read:
        plan, cursor = self._plan, self._at
        self._version, self._flexible = plan.header_version, plan.header_flexible
        self._struct(plan.header, "header", cursor)
        self._version, self._flexible = plan.version, plan.flexible
        self._struct(plan.wanted.message.fields, "", cursor)
        self._leave(cursor, cursor.pos > self._end)
        count = len(cursor.pos)
        throttle_ms = cursor.around.get("throttleTimeMs")
        error_code = cursor.around.get("errorCode")
        replica_id, rack = cursor.around.get(REPLICA_ID), cursor.around.get(RACK_ID)
        return Read(
            self._left,
            self._short,
            np.full(count, NONE, np.int64) if throttle_ms is None else throttle_ms,
            np.full(count, NULL, np.int64) if error_code is None else error_code,
            np.full(count, NONE, np.int64) if replica_id is None else replica_id,
            np.zeros(count, np.int64) if rack is None else ((rack >= 0) & (rack & MAX_TEXT > 0)).astype(np.int64),
            self._found() if self._wanted.detail else None,
        )

    def _found(self) -> Bodies:
        fine = ~(self._left | self._short)
        if not self._rows:
            nothing = np.zeros(0, np.int64)
            numbers = dict.fromkeys(_NUMBERS, nothing)
            return Bodies(nothing, [], nothing, numbers, {}, nothing, np.zeros(0, _HEADER))
        who = np.concatenate([rows for rows, _ in self._rows])
        is_whole = len(self._rows) == 1 and bool(fine.all())  # then the rows are in order
        order: np.ndarray | slice = slice(None)
        if not is_whole:
            order = np.argsort(who, kind="stable")
            order = order[fine[who[order]]]
        columns = {
            name: np.concatenate([self._column(name, rows, values) for rows, values in self._rows])[order]
            for name in (*_TEXTS, *_NUMBERS)
        }
        row, batches = np.zeros(0, np.int64), np.zeros(0, _HEADER)
        if self._batches:
            row = np.concatenate([rows for _, rows, _ in self._batches])
            batches = joined([headers for _, _, headers in self._batches])
            if not is_whole or len(self._batches) > 1:
                place = np.full(len(who), -1)
                place[order] = np.arange(len(who[order]))
                row = place[row]
                of_batches = np.argsort(row, kind="stable")
                of_batches = of_batches[row[of_batches] >= 0]
                row, batches = row[of_batches], picked(batches, of_batches)
        topics, topic = self._topics(columns["topic"], columns["topic_id"])
        return Bodies(
            who[order],
            topics,
            topic,
            {name: columns[name] for name in _NUMBERS},
            {name: self._texts(columns[name]) for name in ("group_id", "metadata") if (columns[name] >= 0).any()},
            row,
            batches,
        )

    @staticmethod
    def _column(name: str, rows: np.ndarray, values_by_name: dict[str, np.ndarray]) -> np.ndarray:
        column = values_by_name.get(name)
        if column is not None:
            return column
        blank = getattr(BLANK, name)
        return np.broadcast_to(
            np.int64(blank if blank is not None else NULL if name not in _TEXTS else -1), (len(rows),)
        )

    def _topics(self, names: np.ndarray, ids: np.ndarray) -> tuple[list[tuple[str | None, UUID | None]], np.ndarray]:
        """The topics that rows are of, and which of them each; the same topic may be there twice."""
        data = self._data.data
        topics: list[tuple[str | None, UUID | None]] = []
        index = np.empty(len(names), np.int64)
        rest = np.arange(len(names))
        while len(rest):
            name, identity = int(names[rest[0]]), int(ids[rest[0]])
            alike = self._alike(names[rest], name) & self._alike(ids[rest], identity)
            index[rest[alike]] = len(topics)
            id_ = _text(data, identity)
            topics.append((_str(_text(data, name)), None if id_ is None else uuid_of(id_)))
            rest = rest[~alike]
            if len(topics) == FEW_TOPICS:
                break
        seen: dict[tuple[bytes | None, bytes | None], int] = {}
        for row, name, identity in zip(rest.tolist(), names[rest].tolist(), ids[rest].tolist(), strict=True):
            key = _text(data, name), _text(data, identity)
            index[row] = seen.setdefault(key, len(topics) + len(seen))
        topics += [(_str(name), None if id_ is None else uuid_of(id_)) for name, id_ in seen]
        return topics, index

    def _alike(self, spans: np.ndarray, one: int) -> np.ndarray:
        """Which texts are the same as one."""
        size = one & MAX_TEXT if one >= 0 else 0
        alike: np.ndarray = (spans >= 0) & (spans & MAX_TEXT == size) if one >= 0 else spans < 0
        if size:
            which = np.flatnonzero(alike)
            start = one >> _TEXT_BITS
            texts = taken(self._data, spans[which] >> _TEXT_BITS, np.dtype(f"S{size}"))
            alike[which] = texts == self._data[start : start + size].tobytes()  # of one size, so exact
        return alike

    def _texts(self, spans: np.ndarray) -> list[str | None]:
        data = self._data.data
        return [_str(_text(data, span)) for span in spans.tolist()]

    # --- what is left to others --------------------------------------------------------------------------------------

    def _leave(self, cursor: _Cursor, which: np.ndarray) -> None:
        if which.any():
            self._left[cursor.who[which]] = True
            self._dead = True

    def _reach(self, cursor: _Cursor, size: int | np.ndarray) -> None:
        """Mark bodies whose next bytes are missing; park their cursor at offset 0, so that gathers stay in bounds."""
        over = cursor.pos + size > cursor.limit
        if not over.any():
            return
        end = self._end[cursor.who]
        if self._seat is not None:
            there = np.flatnonzero(over & (cursor.pos < end) & ~(self._left | self._short)[cursor.who])
            cursor.shift[there], limit = self._seat(cursor.pos[there])
            cursor.limit[there] = np.minimum(limit, end[there])
            over = cursor.pos + size > cursor.limit
        who = cursor.who[over & ~(self._left | self._short)[cursor.who]]
        if len(who):
            self._short[cursor.who[over & (cursor.pos + size <= end)]] = True
            self._short &= ~self._left
            self._left[who] |= ~self._short[who]
            self._dead = True
        cursor.pos[over] = cursor.shift[over] = 0
        cursor.limit[over] = len(self._data)

    def _alive(self, cursor: _Cursor, values: np.ndarray) -> np.ndarray:
        """0 instead, where nothing that is read means anything."""
        if self._dead:
            who = cursor.who
            values[self._left[who] | self._short[who]] = 0
        return values

    # --- the grammar of the wire -------------------------------------------------------------------------------------

    def _take(self, cursor: _Cursor, layout: np.dtype) -> np.ndarray:
        size = layout.itemsize
        self._reach(cursor, size)
        found = taken(self._data, cursor.at, layout)
        cursor.pos += size
        return found

    def _uvarint(self, cursor: _Cursor) -> np.ndarray:
        values = self._take(cursor, np.dtype("u1")).astype(np.int64)
        more = np.flatnonzero(values > 127)
        shift = 7
        values[more] &= 127
        while len(more):
            if shift > 28:
                self._leave(cursor, np.isin(np.arange(len(values)), more))
                break
            rest = cursor.some(more)
            byte = self._take(rest, np.dtype("u1")).astype(np.int64)
            cursor.back(more, rest)
            values[more] |= (byte & 127) << shift
            more = more[byte > 127]
            shift += 7
        if shift > 28:
            self._leave(cursor, values > 0xFFFF_FFFF)
        return self._alive(cursor, values)

    def _length(self, cursor: _Cursor, compact: bool, code: str, nullable: bool) -> np.ndarray:
        """A length or a count; -1 is null."""
        if compact:
            length = self._uvarint(cursor) - 1
        else:
            length = self._take(cursor, np.dtype(_NUMPY[code])).astype(np.int64)
            np.maximum(length, -1, out=length)
        if not nullable:
            self._leave(cursor, length < 0)
        return self._alive(cursor, length)

    def _struct(self, fields: tuple[Field, ...], path: str, cursor: _Cursor) -> None:
        version = self._version
        present = [each for each in fields if version in each.versions and version not in each.tagged_versions]
        run: list[tuple[str, str]] = []
        for each in present:
            code = FIXED.get(each.type)
            if code is not None and version not in each.nullable_versions:
                run.append((join(path, each.name), code))
                continue
            self._settle(run, cursor)
            self._field(each, join(path, each.name), cursor)
        self._settle(run, cursor)
        if self._flexible:
            self._leave(cursor, self._uvarint(cursor) > 0)

    def _settle(self, run: list[tuple[str, str]], cursor: _Cursor) -> None:
        """Read the run of fields of fixed size."""
        if not run:
            return
        kept = [path for path, _ in run if self._keeps(path)]
        if kept:
            found = self._take(cursor, _layout(tuple(run)))
            offset = 0
            for path, code in run:
                if path in kept:
                    if code == "16s":
                        self._kept(path, (cursor.at - found.dtype.itemsize + offset) << _TEXT_BITS | 16, cursor)
                    else:
                        self._kept(path, found[path].astype(np.int64), cursor)
                offset += size_of(code)
        else:
            cursor.pos += sum(size_of(code) for _, code in run)
        run.clear()

    def _keeps(self, path: str) -> bool:
        return path in self._wanted.attributes or path in self._wanted.noted or self._is_asker(path)

    def _is_asker(self, path: str) -> bool:
        return path in (REPLICA_ID, RACK_ID) and path in self._wanted.statements

    def _kept(self, path: str, values: np.ndarray, cursor: _Cursor) -> None:
        if path in self._wanted.noted:
            if path in ("throttleTimeMs", "errorCode"):
                cursor.around[path] = values
            else:
                self._leave(cursor, self._alive(cursor, values) != 0)
        if self._is_asker(path):
            cursor.around[path] = values
        name = self._wanted.attributes.get(path)
        if name is not None:
            cursor.around[name.removeprefix("of_")] = values

    def _field(self, each: Field, path: str, cursor: _Cursor) -> None:
        nullable = self._version in each.nullable_versions
        compact = self._flexible and each.compactable
        if each.is_array:
            self._array(each, path, cursor, self._length(cursor, compact, "i", nullable))
        elif each.is_struct:
            if nullable:
                there = self._take(cursor, np.dtype("i1")) >= 0
                self._of_some(cursor, self._alive(cursor, there), lambda some: self._struct(each.fields, path, some))
            else:
                self._struct(each.fields, path, cursor)
        else:
            self._primitive(each.type, path, cursor, compact, nullable)

    def _primitive(self, type_: str, path: str, cursor: _Cursor, compact: bool, nullable: bool) -> None:
        length = self._length(cursor, compact, "h" if type_ == "string" else "i", nullable)
        if type_ == "records" and self._wanted.partitions:
            self._records(cursor, np.maximum(length, 0))
        elif self._keeps(path):
            self._leave(cursor, length > MAX_TEXT)
            size = np.maximum(self._alive(cursor, length), 0)
            self._reach(cursor, size)
            self._kept(path, np.where(length < 0, -1, cursor.at << _TEXT_BITS | size), cursor)
            cursor.pos += size
        else:
            cursor.pos += np.maximum(length, 0)

    def _array(self, each: Field, path: str, cursor: _Cursor, count: np.ndarray) -> None:
        np.maximum(count, 0, out=count)
        code = FIXED.get(each.element_type)
        if code is not None:
            cursor.pos += count * size_of(code)
            return
        if count.max(initial=0) > ALONE:
            rounds = np.sort(count)[-ABREAST] if len(count) >= ABREAST else 0
            self._leave(cursor, count > min(max(rounds, ALONE), MOST))
        self._alive(cursor, count)
        element = f"{path}[]"
        for number in range(int(count.max(initial=0))):
            self._of_some(cursor, count > number, lambda some: self._element(each, path, element, some))

    def _of_some(self, cursor: _Cursor, which: np.ndarray, step: Callable[[_Cursor], None]) -> None:
        """Take a step with some of the bodies."""
        if which.all():
            inside = _Cursor(cursor.who, cursor.pos, cursor.limit, cursor.shift, dict(cursor.around))
            step(inside)
            cursor.pos = inside.pos
        elif which.any():
            inside = cursor.some(which)
            step(inside)
            cursor.back(which, inside)

    def _element(self, each: Field, path: str, element: str, cursor: _Cursor) -> None:
        if not each.is_struct:
            self._primitive(each.element_type, element, cursor, self._flexible and each.compactable, False)
            return
        is_partition = element in self._wanted.partitions
        first = self._row
        if is_partition:
            self._row += len(cursor.pos)
            cursor.around["row"] = np.arange(first, self._row)
        self._struct(each.fields, path, cursor)
        if is_partition:
            self._rows.append((cursor.who, cursor.around))

    def _records(self, cursor: _Cursor, size: np.ndarray) -> None:
        """Record batches: only their headers are read."""
        around = cursor.around
        self._alive(cursor, size)
        stop = cursor.pos + size
        sums = {name: np.full(len(size), getattr(BLANK, name), np.int64) for name in _CARRIED}
        sums["bytes"] = size
        around.update(sums)
        left = size.copy()
        for number in range(MOST):
            now = np.flatnonzero(left > 0)
            if not len(now) or (number >= ALONE and len(now) < ABREAST):
                break
            which = np.zeros(len(left), bool)
            which[now] = True
            self._leave(cursor, which & (left < HEADER_BYTES))
            inside = cursor.some(now)
            header = self._take(inside, _HEADER)
            cursor.limit[now], cursor.shift[now] = inside.limit, inside.shift
            whole = header["length"].astype(np.int64) + _PREFIX_BYTES
            odd = (header["magic"] != 2) | (header["record_count"] < 0) | (whole < HEADER_BYTES) | (whole > left[now])
            self._leave(inside, odd)
            whole = self._alive(inside, whole)
            self._add(sums, now, header, around["row"][now] if "row" in around else now, inside)
            left[now] -= whole
            left[now[whole == 0]] = 0
            cursor.pos[now] += whole
        self._leave(cursor, left > 0)
        cursor.pos = stop

    def _add(
        self, sums: dict[str, np.ndarray], now: np.ndarray, header: np.ndarray, row: np.ndarray, cursor: _Cursor
    ) -> None:
        """A batch of each of some partitions."""
        attributes = header["attributes"].astype(np.int64)
        base = header["base_offset"].astype(np.int64)
        first = sums["batches"][now] == 0
        sums["first_offset"][now[first]] = base[first]
        sums["batches"][now] += 1
        sums["magic"][now] = 2
        sums["codecs"][now] |= 1 << (attributes & CODEC)
        sums["last_offset"][now] = base + header["last_offset_delta"]
        sums["max_timestamp"][now] = np.maximum(sums["max_timestamp"][now], header["max_timestamp"])
        sums["records"][now] += np.where(attributes & CONTROL, 0, header["record_count"])
        self._batches.append((cursor.who, row, header))


@cache
def _layout(run: tuple[tuple[str, str], ...]) -> np.dtype:
    return np.dtype([(path, _NUMPY[code]) for path, code in run])


_PREFIX_BYTES = HEADER_BYTES - LEAST_LENGTH[2]


def _text(data: memoryview, span: int) -> bytes | None:
    if span < 0:
        return None
    start = span >> _TEXT_BITS
    return bytes(data[start : start + (span & MAX_TEXT)])


def _str(text: bytes | None) -> str | None:
    return None if text is None else str(text, "utf-8", "replace")
