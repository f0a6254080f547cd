"""Tables on DuckDB, the engine inside this process: an answer takes about a second, without a JVM.

    with Tables("tables") as tables:
        print(jobs.latency(tables["exchanges"], by=["client"]).arrow())

Duty: views over the Parquet files of a dataset, with the columns that this kproxy knows (null where a file lacks them),
and macros that give DuckDB the functions that questions use by Spark's names. Percentiles are exact here: 8 bytes of
memory for each row and percentile.

A table of at most SMALL_ROWS rows in at most SMALL_FILES files is read once, into memory: a report asks a hundred
questions, and planning one over Parquet files takes longer than answering it from so few rows. Rows of more files are
not counted: opening a thousand files takes half a second.

Retention may remove files of a live recording while a question reads them: the question then reads again, ATTEMPTS
times at most, without the files that are removed next.

Bounds: DuckDB uses up to 80 % of the machine's memory, and beyond that a temporary folder, which is deleted at the end.
It reads only the files of the dataset, and writes only to that folder. Refuses to know questions.
"""

import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from secrets import token_hex
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kproxy.analysis.questions.pieces import no_such
from kproxy.errors import KproxyError
from kproxy.tables import dataset, schema, views
from kproxy.tables.live.retention import REMEDY, is_recorded

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection

Result = TypeVar("Result")

FETCHED_ROWS = 2048  # at a time
SMALL_ROWS = 20_000
SMALL_FILES = 16
ATTEMPTS = 3  # attempts to read files of a recording while its retention removes some
_REMOVED = f"retention removes files of this recording faster than they are read: {REMEDY}"

# Spark's functions, defined in DuckDB's SQL. Functions with the same name and meaning in both are not here.
MACROS = {
    "try_divide(a, b)": "cast(a as double) / nullif(cast(b as double), 0)",
    "unix_micros(t)": "epoch_us(t)",
    "timestamp_micros(us)": "make_timestamptz(cast(us as bigint))",
    "percentile_approx(x, share, accuracy)": "quantile_disc(x, share)",
    "max_by(x, key)": "arg_max_null(x, key)",  # as Spark: the value there, null or not
    "min_by(x, key)": "arg_min_null(x, key)",
    "sequence(first, last)": "generate_series(first, last)",
    "explode(list)": "unnest(list)",
    "count_if(holds)": "count(case when holds then 1 end)",  # its own is null where the condition always is
    "regexp_like(x, pattern)": "regexp_matches(x, pattern)",
    "named_struct(a, x, b, y)": "row(x, y)",
    "named_struct(a, x, b, y, c, z)": "row(x, y, z)",
    "named_struct(a, x, b, y, c, z, d, w)": "row(x, y, z, w)",
    "size(x)": "len(x)",
    "collect_list(x)": "list(x)",
    "array_join(x, separator)": "array_to_string(x, separator)",
    "format_number(x, decimals)": (
        "case decimals when 0 then format('{:,.0f}', cast(x as double)) "
        "when 1 then format('{:,.1f}', cast(x as double)) else format('{:,.2f}', cast(x as double)) end"
    ),
}


class _Engine:
    """A connection whose views read files of live recordings, which retention may remove at any time."""

    def __init__(self, connection: "DuckDBPyConnection") -> None:
        self.connection = connection
        self._views: dict[str, tuple[Path, str]] = {}  # (folder, table) of each

    def view(self, name: str, folder: Path, table: str, files: Sequence[Path]) -> None:
        """Define a view of a table's files."""
        self.connection.execute(f"create or replace view {quoted(name)} as {_reading(table, files)}")
        self._views[name] = folder, table

    def run(self, work: Callable[[], "Result"], attempts: int = ATTEMPTS) -> "Result":
        """Run `work`, which reads views; repeat it with the current files if retention removed one meanwhile.

        Raises KproxyError if retention did so in each attempt.
        """
        import duckdb

        since = monotonic()
        while True:
            attempts -= 1
            try:
                with _interruptible():
                    return work()
            except duckdb.IOException as fault:
                if not _is_removed(fault):
                    raise
                if not attempts:
                    raise KproxyError(_REMOVED) from fault
            self._look_again(1 + 2 * (monotonic() - since))

    def _look_again(self, passing_s: float) -> None:
        """Define the views again, with the current files but the oldest, which retention will remove next.

        passing_s: the oldest seconds of the recording to leave out. Raises KproxyError if nothing else is left.
        """
        import duckdb

        files = {place: _files(*place) for place in dict.fromkeys(self._views.values())}
        times = {file: time_s for of_table in files.values() for file in of_table if (time_s := _written_s(file))}
        kept_s = min(times.values(), default=0) + passing_s
        if times and kept_s > max(times.values()):
            raise KproxyError(_REMOVED)
        for name, place in self._views.items():
            left = [file for file in files[place] if file in times and times[file] >= kept_s]
            with suppress(duckdb.IOException):  # found by the question, too
                self.view(name, *place, left)


def _written_s(file: Path) -> float:
    """When a file of a recording was written, in seconds; infinity for another file, 0 for one that is gone."""
    try:
        return file.stat().st_mtime if is_recorded(file.name) else inf
    except FileNotFoundError:
        return 0


def _is_removed(fault: Exception) -> bool:
    """Whether DuckDB did not find a file that retention may remove."""
    found = re.search(r'"([^"]+\.parquet)": No such file|pattern "([^"]+\.parquet)"', str(fault))
    return found is not None and is_recorded(Path(found[1] or found[2]).name)


class Frame:
    """A table or an answer: a SELECT of DuckDB. Nothing is computed before rows are asked for."""

    def __init__(self, engine: _Engine, text: str) -> None:
        self.text = text
        self._engine = engine
        self._dtypes: list[tuple[str, str]] | None = None

    def asked(self, text: str) -> "Frame":
        """The answer to a SELECT on the same connection. Raises DuckDB's errors for one that it does not take."""
        frame = Frame(self._engine, text)
        frame._dtypes = frame._described()
        return frame

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        """Names and types of the columns, in DuckDB's words."""
        if self._dtypes is None:
            self._dtypes = self._described()
        return self._dtypes

    @property
    def columns(self) -> list[str]:
        return [name for name, _ in self.dtypes]

    def _described(self) -> list[tuple[str, str]]:
        connection = self._engine.connection
        found = self._engine.run(lambda: connection.execute(f"describe {self.text}").fetchall())
        return [(name, kind) for name, kind, *_ in found]

    def limit(self, count: int) -> "Frame":
        """The first rows."""
        frame = Frame(self._engine, f"select * from ({self.text}) limit {int(count)}")
        frame._dtypes = self._dtypes  # not asked again
        return frame

    def in_micros(self, times: Collection[str]) -> "Frame":
        """The same rows with these columns as microseconds since the epoch."""
        chosen = ", ".join(
            f"unix_micros({quoted(name)}) as {quoted(name)}" if name in times else quoted(name) for name in self.columns
        )
        frame = Frame(self._engine, f"select {chosen} from ({self.text})")
        frame._dtypes = [(name, "BIGINT" if name in times else kind) for name, kind in self.dtypes]  # not asked again
        return frame

    @contextmanager
    def stored(self) -> Iterator["Frame"]:
        """The same rows in a table of their own, which ends with the block."""
        name, connection = quoted(f"stored_{token_hex(6)}"), self._engine.connection
        self._engine.run(lambda: connection.execute(f"create table {name} as {self.text}"))
        try:
            yield Frame(self._engine, f"select * from main.{name}")
        finally:
            connection.execute(f"drop table main.{name}")

    def fetched(self) -> Iterator[tuple[Any, ...]]:
        """The rows as tuples of Python's values."""
        cursor = self._engine.connection.cursor()
        text = self._plain()
        try:
            portion = self._engine.run(lambda: cursor.execute(text).fetchmany(FETCHED_ROWS))
            while portion:
                yield from portion
                portion = self._engine.run(lambda: cursor.fetchmany(FETCHED_ROWS), attempts=1)
        finally:
            cursor.close()

    def arrow(self) -> "pa.Table":
        """All rows as an Arrow table."""
        text = self._plain()
        return self._engine.run(lambda: self._engine.connection.sql(text).to_arrow_table())

    def _plain(self) -> str:
        """The same with sums as the 64-bit integers that Spark makes of them."""
        wide = [name for name, kind in self.dtypes if kind == "HUGEINT"]
        casts = ", ".join(f"cast({quoted(name)} as bigint) as {quoted(name)}" for name in wide)
        return f"select * replace ({casts}) from ({self.text})" if wide else self.text


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends a question as everything else: DuckDB has an error of its own for it."""
    try:
        yield
    except RuntimeError as fault:
        if "interrupted" in str(fault).lower():
            raise KeyboardInterrupt from None
        raise


class Tables(Mapping[str, Frame]):
    """The tables of a dataset, each read when it is first requested. Close it, or use it in a `with`.

    Raises KproxyError if the folder is no dataset, lacks a requested table, or was written by a newer kproxy;
    ModuleNotFoundError without duckdb.
    """

    def __init__(self, folder: str | Path, others: Sequence[str | Path] = ()) -> None:
        """others: further folders that questions may read (`beside`)."""
        import duckdb

        self.folder = Path(folder)
        self._connection = duckdb.connect(
            ":memory:",
            config={
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                # Questions have the smaller side on the right of a join. DuckDB would swap the sides by its estimates:
                # it would search all rows of partitions for brokers' own exchanges, though there are few or none.
                # If the right side of a left join has no rows, DuckDB 2.0.1 wrongly infers from statistics that its
                # columns have no nulls and that a HAVING over them is false: groups are missing from the answer.
                "disabled_optimizers": "build_side_probe_side, statistics_propagation",
            },
        )
        self._frames: dict[str, Frame] = {}
        allowed = [str(Path(place).absolute()) for place in (folder, *others)]
        # DuckDB compares both a pattern as it is written, and the files that it matches, with the folders.
        folders = ", ".join(map(_text, dict.fromkeys((*allowed, *map(_escaped, allowed)))))
        # Folder for data beyond memory; the default, the current folder, may be readable by others, or read-only.
        spilled = Path(tempfile.gettempdir()) / f"kproxy-{os.getpid()}-{token_hex(6)}.spilled"
        for statement in (
            "set timezone = 'UTC'",
            f"set temp_directory = {_text(str(spilled))}",
            "set default_null_order = 'nulls_first_on_asc_last_on_desc'",  # as in Spark
            *(f"create macro {head} as {body}" for head, body in _macros()),
            f"set allowed_directories = [{folders}]",
            "set enable_external_access = false",
            "set lock_configuration = true",
        ):
            self._connection.execute(statement)
        self._engine = _Engine(self._connection)

    def __enter__(self) -> "Tables":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine: its frames cannot be used any more."""
        self._connection.close()

    def __getitem__(self, name: str) -> Frame:
        if name not in schema.BY_NAME:
            raise KeyError(name)
        if name not in self._frames:
            self._engine.run(lambda: self._define(name))
            # With its schema: a step of a question that has the table's name is another one.
            self._frames[name] = Frame(self._engine, f"select * from main.{quoted(name)}")
        return self._frames[name]

    def _define(self, name: str) -> None:
        files = _files(self.folder, name)
        self._refuse_foreign(name, [file for file in files if not is_recorded(file.name)])
        text = _reading(name, files)
        if self._is_small(text, files):
            self._connection.execute(f"create table {quoted(name)} as {text}")
        else:
            self._engine.view(name, self.folder, name, files)

    def _refuse_foreign(self, name: str, files: Sequence[Path]) -> None:
        """Raise KproxyError for a Parquet file that is no part of a table: all tables have the column `source`."""
        if not files:
            return
        listed = ", ".join(_text(_escaped(str(path))) for path in files)
        found = self._connection.execute(
            f"select file_name from parquet_schema([{listed}]) "
            "group by file_name having not bool_or(name = 'source') order by file_name limit 1"
        ).fetchone()
        if found is not None:
            raise KproxyError(
                f"{found[0]} is no file of the table {name}, since it lacks the column source: move it elsewhere"
            )

    def _is_small(self, text: str, files: Sequence[Path]) -> bool:
        if len(files) > SMALL_FILES:
            return False
        (rows,) = self._connection.execute(f"select count(*) from ({text})").fetchall()[0]
        return bool(rows <= SMALL_ROWS)

    def query(self, text: str) -> Frame:
        """The answer to a SELECT, which may name every table that was asked for before."""
        return Frame(self._engine, text)

    def sql(self, text: str) -> Frame:
        """The answer to one SELECT over all tables that are there, as a user typed it.

        Raises KproxyError for another statement, for several, and for an unknown name, with a list of the known ones.
        """
        import duckdb

        self.names()
        try:
            statements = self._connection.extract_statements(text)
        except duckdb.ParserException:
            if (word := self._reserved_column(text)) is None:
                raise
            message = f'the query cannot be read: {word} is a word of SQL, as a column it is written "{word}"'
            raise KproxyError(message) from None
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise KproxyError("one SELECT is asked for, and nothing that changes anything")
        query = _alone(statements[0].query)
        try:
            return Frame(self._engine, "").asked(query)
        except duckdb.CatalogException as fault:
            found = re.search(r"Table with name (\S+) does not exist", str(fault))
            if found is None:
                raise
            raise no_such("there is no table", found[1], sorted(self._frames)) from None
        except duckdb.BinderException as fault:
            found = re.search(r'column "(\w+)" not found', str(fault))
            if found is None:
                raise
            columns = dict.fromkeys(column for frame in self._frames.values() for column in frame.columns)
            named = [name for name in self._frames if re.search(rf"\b{name}\b", query)]
            near = dict.fromkeys(column for name in named for column in self._frames[name].columns)
            raise no_such("there is no column", found[1], list(near or columns)) from None

    def _reserved_column(self, text: str) -> str | None:
        """The first word of a query that is a column's name, and that SQL has reserved for itself."""
        reserved = "select keyword_name from duckdb_keywords() where keyword_category = 'reserved'"
        words = {word for (word,) in self._connection.execute(reserved).fetchall()}
        words &= {column for frame in self._frames.values() for column in frame.columns}
        plain = re.sub(r"'[^']*'|\"[^\"]*\"|--[^\n]*", " ", text.lower())
        return next((word for word in re.findall(r"\w+", plain) if word in words), None)

    def names(self) -> dict[str, list[str]]:
        """The tables that are there, and views over them, each with its columns."""
        for name in schema.BY_NAME:
            with suppress(KproxyError):
                self[name]
        for name, text in views.VIEWS.items():
            if name not in self._frames and all(table in self._frames for table in views.NEEDED[name]):
                self._connection.execute(f"create view {quoted(name)} as {text}")
                self._frames[name] = Frame(self._engine, f"select * from main.{quoted(name)}")
        return {
            name: schema.BY_NAME[name].schema.names if name in schema.BY_NAME else frame.columns
            for name, frame in self._frames.items()
        }

    def statements(self, text: str) -> list[str]:
        """The statements of a text that has several, ended by semicolons. Raises DuckDB's error if it is no SQL."""
        return [statement.query for statement in self._connection.extract_statements(text)]

    def beside(self, folder: str | Path, name: str) -> Frame:
        """A table of another dataset, to compare."""
        view = f"beside_{token_hex(6)}"
        self._engine.run(lambda: self._engine.view(view, Path(folder), name, _files(Path(folder), name)))
        return Frame(self._engine, f"select * from main.{quoted(view)}")

    def __iter__(self) -> Iterator[str]:
        return iter(schema.BY_NAME)

    def __len__(self) -> int:
        return len(schema.BY_NAME)


def _alone(statement: str) -> str:
    """A statement as a part of another: without its semicolon, and so that a remark at its end ends with its line."""
    import duckdb

    raw = statement.encode()  # tokens are counted in bytes
    offsets = [offset for offset, kind in duckdb.tokenize(statement) if kind != duckdb.token_type.comment]
    if offsets and raw[offsets[-1] : offsets[-1] + 1] == b";":
        raw = raw[: offsets[-1]]
    return f"{raw.decode()}\n"


def _files(folder: Path, name: str) -> list[Path]:
    """The files of a table of a dataset, by absolute paths; readers skip names that begin with "_" or ".".

    Raises KproxyError as `dataset.has_rows`.
    """
    if not dataset.has_rows(str(folder), name):
        return []
    return sorted(path for path in (folder.absolute() / name).rglob("*.parquet") if path.name[0] not in "_.")


def _reading(name: str, files: Sequence[Path]) -> str:
    """A SELECT of all the rows of a table's files, with the columns that this kproxy knows."""
    known = schema.BY_NAME[name].schema
    blank = ", ".join(f"cast(null as {type_text(field.type)}) as {quoted(field.name)}" for field in known)
    none = f"select {blank} where false"
    if not files:
        return none
    paths = [str(path) for path in files]
    by_hour = any("/date=" in path for path in paths)
    listed = ", ".join(_text(_escaped(path)) for path in paths)
    read = f"read_parquet([{listed}], union_by_name = true, hive_partitioning = {str(by_hour).lower()})"
    columns = ", ".join(quoted(field.name) for field in known)
    hours = ", date, hour" if by_hour else ""
    # First all columns in their order, as a file may lack any; further columns of newer files are left out.
    return f"select {columns}{hours} from ({none} union all by name select * from {read})"


def _macros() -> Iterator[tuple[str, str]]:
    """Heads and bodies; macros of one name, with different numbers of parameters, are one statement."""
    by_name: dict[str, list[str]] = {}
    for head, body in MACROS.items():
        name, _, parameters = head.partition("(")
        by_name.setdefault(name, []).append(f"({parameters} as {body}")
    for name, forms in by_name.items():
        first, *more = forms
        head, _, body = first.partition(" as ")
        yield f"{name}{head}", ", ".join([body, *more])


def quoted(name: str) -> str:
    """A name of a column or a table."""
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _escaped(path: str) -> str:
    """A path as a pattern that stands for it alone."""
    return re.sub(r"([*?\[])", r"[\1]", path)


def type_text(kind: "pa.DataType") -> str:
    """A type of Arrow in DuckDB's words."""
    import pyarrow.types as of

    if of.is_list(kind):
        return f"{type_text(kind.value_type)}[]"
    if of.is_struct(kind):
        return f"struct({', '.join(f'{quoted(field.name)} {type_text(field.type)}' for field in kind)})"
    return _TYPES[str(kind)]


_TYPES = {
    "int16": "smallint",
    "int32": "integer",
    "int64": "bigint",
    "double": "double",
    "string": "varchar",
    "bool": "boolean",
    "binary": "blob",
    "timestamp[us, tz=UTC]": "timestamptz",
}
