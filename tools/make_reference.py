"""Makes the pages of docs/reference/ from the code: `python tools/make_reference.py`. A test holds them equal.

The code is the `kproxy` that Python imports: in another checkout than the installed one, set PYTHONPATH to it.

What a setting means is said where it is declared: by the help of its option, else by the comment behind its field or
above it. A setting without either is an error here.
"""

import ast
import html
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kproxy.analysis.jobs import JOBS
from kproxy.cli import cli
from kproxy.protocol.schema import ADDRESS_CARRIERS, schema, served_versions
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.api_groups import GROUPS, group_of
from kproxy.proxy.config.limits import Network
from kproxy.proxy.config.model import model_in
from kproxy.proxy.config.settings import CLUSTER_SETTINGS, PROCESS_SETTINGS, Config
from kproxy.proxy.filters.policy.resources import ALSO
from kproxy.proxy.filters.policy.resources import KINDS as PLAIN_KINDS
from kproxy.proxy.filters.policy.rights import CLUSTER_ACTION, RIGHTS, Right
from kproxy.spark.source import spark_type
from kproxy.tables import meanings
from kproxy.tables import schema as tables_schema

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/reference"
MADE = "<!-- made by tools/make_reference.py -->\n\n"

RUN = cli.get_command(click.Context(cli), "run")
assert RUN is not None
QUESTIONS = {*JOBS, "findings", "overview"}

SETTINGS = """# Settings

This page lists every setting of `kproxy run` with its name in the configuration file, its values, its default and its
meaning. The option `--config`, or the variable `KPROXY_CONFIG`, is the path of that file.

Some settings are options and environment variables too: `broker_port_base` is `--broker-port-base` and
`KPROXY_BROKER_PORT_BASE`. The last column has the option; "variable" means that there is only the variable. An option
takes precedence over the variable, and the variable over the file.

[kproxy.toml](../../deploy/kproxy.toml) is an example to begin with. `kproxy check FILE` lists all faults of a file."""

COMMANDS = """# Commands

This page has the `--help` of every command. The questions of `kproxy analyze` and `kproxy spark` are on
[a separate page](questions.md)."""

COLUMNS = """# Columns

This page lists every column of every table with its Arrow type, its unit and its meaning. [The tables](../tables.md)
describes the rows of each table. The files themselves contain the same texts, as metadata of Arrow's fields:

```python
import pyarrow.parquet as pq

for field in pq.read_schema("tables/exchanges/incident.pcap.parquet"):
    print(field.name, field.metadata)
```"""

STATEMENTS = """\
-- made by tools/make_reference.py
-- The tables in the layout of `kproxy spark ingest`, for a catalogue that needs them before there are data. Add
-- `location 'FOLDER/TABLE'`, and after each ingest `msck repair table TABLE`; or add `using delta` or `using iceberg`.
"""

ASKING = """# Questions

`kproxy analyze` answers these questions on one machine, and `kproxy spark` for tables of any size. A question has the
same name and the same answer in both. [analyze.md](../analyze.md) is a guide to them.

## Options of every question
"""

APIS = """# APIs and versions

This page lists every API of Kafka {first} to {last}. kproxy decodes requests and answers of all these versions. It
forwards other keys and versions undecoded, and pairs them with their answers.

- *flexible*: from this version on, messages have tagged fields (KIP-482).
- *served by*: the releases of Kafka in which the API is stable.
- *group*: the API's group in rules of a [policy](../policy.md): {groups}.
- *addresses*: the API's answers contain addresses of brokers, which kproxy rewrites.
"""

RIGHTS_PAGE = """# Rights

This page lists, for each API and field, the rights that Kafka's brokers require with StandardAuthorizer, and the rule
of a [policy](../policy.md) that kproxy requires. kproxy never requires less, as tests check, with one exception: a
Metadata before version 4 has no flag that kproxy could clear, so a broker with `auto.create.topics.enable` may create
the topics in it.

The middle column comes from Kafka 4.1 (KafkaApis, ControllerApis), from 2.0 and 3.9 for APIs that Kafka 4 lacks, and
from KIP-1312 and KIP-1331 for APIs of Kafka 4.4. A test compares it with the classes of Kafka 4.1 and with a broker.

- *a rule that allows the topic*: a rule with `topic`, or a rule without names; the same applies to groups and
  transactional ids.
- *a rule without names*: a rule without `topic`, `group` and `transactional_id`, or a default that allows.
- *a rule for brokers*: a rule without names that allows the API, but no default. If the last column has *`broker`*, the
  rule must allow this whole group.
- *the same, else the answer is without it*: unless `filter_lists` is off.
- Rules that deny always apply, also those with names. `read_only` refuses all requests that need other rights than
  Read, Describe and DescribeConfigs.

kproxy requires more than a broker in these cases: a ListOffsets or OffsetForLeaderEpoch with a replica id, and a Fetch
with an id below -2, need a rule for `broker`, as do versions 0 and 1 of OffsetForLeaderEpoch, for which brokers before
Kafka 2.1 required it. A Metadata with several topics creates none of them if the client may not create one of them. A
member of a Streams group needs the right to create its internal topics even if they exist.
"""

KINDS: dict[Any, str] = {
    Address: "`HOST:PORT`",
    Path: "path",
    Network: "network, like `10.0.0.0/8`",
    bool: "`true`, `false`",
    float: "number",
    int: "whole number",
    range: "range, like `0-9`",
    str: "text",
}

MORE = {  # the page that teaches a table of settings
    "admin_tls": "admin.md",
    "flight": "flight.md",
    "otlp": "otlp.md",
    "cluster.login": "sasl.md",
    "cluster.login.by_principal": "sasl.md",
    "cluster.authentication": "sasl.md",
    "cluster.lag": "groups.md",
    "cluster.limits": "limits.md",
    "cluster.policy": "policy.md",
    "cluster.telemetry": "telemetry.md",
    "cluster.tls": "tls.md",
    "cluster.upstream_tls": "tls.md",
    "zookeeper": "zookeeper.md",
}


def pages() -> dict[str, str]:
    """Each page of docs/reference/ by its name, as it should read."""
    made = {
        "settings": settings(),
        "commands": commands(),
        "questions": questions(),
        "apis": apis(),
        "rights": rights(),
        "columns": columns(),
    }
    written = {f"{name}.md": MADE + re.sub(r"\n{3,}", "\n\n", text) for name, text in made.items()}
    return written | {"tables.sql": statements()}


# Settings


def settings() -> str:
    lines = [SETTINGS]
    for path, model, many in tables("", Config, False):
        said = (inspect.getdoc(model) or "").partition("\n")[0]
        if path:
            said = said.partition("`: ")[2] or said
        name = f"[[{path}]]" if many else f"[{path}]" if path else ""
        said = f"{said[:1].upper()}{said[1:]}"
        more = f" More: [{MORE[path]}](../{MORE[path]})." if path in MORE else ""
        lines += ["", f"## {f'`{name}`' if name else 'Process'}", "", said + more, ""]
        option = next((each for each in RUN.params if each.name == path), None)
        if isinstance(option, click.Option):
            lines += [f"The option `{option.opts[0]} {option.metavar}` is short for this table with its defaults.", ""]
        if not path:
            lines += ["Write these settings above the first `[[cluster]]`.", ""]
        lines += ["| setting | value | default | meaning | option |", "|---|---|---|---|---|"]
        lines += [row(path, model, field) for field in model.model_fields if not is_table(model, field)]
    return "\n".join(lines) + "\n"


def tables(path: str, model: type[BaseModel], many: bool) -> Iterator[tuple[str, type[BaseModel], bool]]:
    """Each table of the file, with its path, and whether there can be several of it."""
    yield path, model, many
    for name in model.model_fields:
        inner = model_in(model.model_fields[name].annotation)
        if inner is not None:
            below = "cluster" if name == "clusters" else f"{path}.{name}".lstrip(".")
            yield from tables(below, inner, "tuple" in str(model.model_fields[name].annotation))


def is_table(model: type[BaseModel], field: str) -> bool:
    return model_in(model.model_fields[field].annotation) is not None


def row(path: str, model: type[BaseModel], field: str) -> str:
    info = model.model_fields[field]
    also = ""
    settable = {"": PROCESS_SETTINGS, "cluster": CLUSTER_SETTINGS}.get(path, ())
    if field in settable:
        option = option_of(path, field)
        also = "variable" if option is None else f"`{option.opts[0]}`"
    shown = default(info.default, info.is_required())
    cells = (f"`{field}`", value(info.annotation, info.metadata), shown, meaning(path, model, field), also)
    return "| " + " | ".join(cells) + " |"


def option_of(path: str, field: str) -> click.Option | None:
    """The option of `kproxy run` that sets it."""
    found = [each for each in RUN.params if each.name == field and isinstance(each, click.Option)]
    return found[0] if found and path in ("", "cluster") else None


def value(annotation: Any, metadata: Any = ()) -> str:
    """What may be written there."""
    low = high = ""
    for each in metadata:
        for name, words in (("ge", "from {}"), ("gt", "above {}"), ("le", "to {}"), ("lt", "below {}")):
            bound = getattr(each, name, None)
            if bound is not None:
                part = words.format(f"{bound:,}" if isinstance(bound, int) else f"{bound:g}")
                low, high = (part, high) if name in ("ge", "gt") else (low, part)
        if hasattr(each, "metadata"):  # a FieldInfo
            return value(annotation, each.metadata)
    bounds = ", " + " ".join(part for part in (low, high) if part) if low or high else ""
    origin = get_origin(annotation)
    if origin is Annotated:
        return value(get_args(annotation)[0], annotation.__metadata__)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in get_args(annotation))
    if origin is tuple:
        return f"list of: {value(get_args(annotation)[0])}"
    if annotation != Network and (origin is Union or type(annotation).__name__ == "UnionType"):
        kinds = [one for one in get_args(annotation) if one is not type(None)]
        names = list(dict.fromkeys(value(kind) for kind in kinds))
        return " or ".join(names) + bounds
    return KINDS[annotation] + bounds


def default(given: Any, required: bool) -> str:
    if required or given is PydanticUndefined:
        return "required"
    if given is None or given == ():
        return ""
    if isinstance(given, bool):
        return f"`{str(given).lower()}`"
    if isinstance(given, tuple):
        return ", ".join(f"`{one}`" for one in given)
    return f"`{given:g}`" if isinstance(given, float) else f"`{given}`"


def meaning(path: str, model: type[BaseModel], field: str) -> str:
    info, option = model.model_fields[field], option_of(path, field)
    if option is not None and option.flag_value is not False and option.help:
        said = option.help if info.default is None else re.sub(r" Default: [^.]+\.$", "", option.help)
        return cell(escaped(said))
    text = comment_of(model, field)
    if not text:
        raise SystemExit(f"[{path}] {field}: nothing says what it means; put a comment behind its field")
    return cell(escaped(f"{text[:1].upper()}{text[1:]}") + ("" if text.endswith(".") else "."))


def comment_of(model: type[BaseModel], field: str) -> str:
    """The comment behind a field or above it, in the class that declares it."""
    owner = next(each for each in model.__mro__ if field in vars(each).get("__annotations__", {}))
    source = textwrap.dedent(inspect.getsource(owner))
    lines = source.splitlines()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == field:
            behind = lines[node.end_lineno - 1][node.end_col_offset :].strip()
            above: list[str] = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip("# "))
            return " ".join((*above, behind.lstrip("# "))).strip()
    raise AssertionError(field)


def code(text: str) -> str:
    """In a cell of a table, where Markdowns differ about a | in code."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# Commands


def commands() -> str:
    lines = [COMMANDS]
    for context in walked(click.Context(cli, info_name="kproxy")):
        parent = "" if context.parent is None else context.parent.info_name
        if parent in ("analyze", "spark") and context.info_name in QUESTIONS:
            continue
        lines += ["", *described(context, "##")]
    return "\n".join(lines) + "\n"


def walked(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            yield from walked(click.Context(command, parent=context, info_name=name))


def described(context: click.Context, level: str, left_out: frozenset[str] = frozenset()) -> Iterator[str]:
    """The section of a command."""
    command = context.command
    yield f"{level} {context.command_path}"
    yield ""
    usage = " ".join(command.collect_usage_pieces(context))
    yield from ("```", f"{context.command_path} {usage}", "```", "")
    yield from prose(command.help or "")
    records = [record for record in own_records(command, context) if record[0] not in left_out]
    if records:
        yield from ("", "| option | meaning |", "|---|---|")
        yield from (f"| {code(names)} | {cell(escaped(help_))} |" for names, help_ in records)
    if command.epilog:
        yield ""
        yield from prose(command.epilog)


def own_records(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    found = [each.get_help_record(context) for each in command.params if isinstance(each, click.Option)]
    return [record for record in found if record is not None]


def prose(text: str) -> Iterator[str]:
    """A help text: paragraphs, and as code what click prints as it stands."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        if number:
            yield ""
        lines = paragraph.splitlines()
        if lines[:1] != ["\b"]:
            yield from map(escaped, lines)
            continue
        code = False
        for line in lines[1:]:
            if line.startswith(" ") != code:
                code = not code
                yield from ("", "```") if code else ("```", "")
            yield line.strip() if code else escaped(line)
        if code:
            yield "```"


def escaped(text: str) -> str:
    """Without what Markdown would take for HTML or emphasis, but for what is code already."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(\*|(?<!\w)_|_(?!\w))", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


# Questions


def questions() -> str:
    parent = click.Context(cli.get_command(click.Context(cli), "analyze"), info_name="kproxy analyze")
    assert isinstance(parent.command, click.Group)
    contexts = [
        click.Context(command, parent=parent, info_name=name)
        for name in parent.command.list_commands(parent)
        if (command := parent.command.get_command(parent, name)) is not None and name in QUESTIONS
    ]
    records = [own_records(context.command, context) for context in contexts]
    shared = [record for record in records[2] if all(record in others for others in records)]
    lines = [
        ASKING,
        "| option | meaning |",
        "|---|---|",
        *(f"| {code(names)} | {cell(escaped(help_))} |" for names, help_ in shared),
    ]
    for context in contexts:
        lines += ["", *described(context, "##", frozenset(names for names, _ in shared))]
        job = JOBS.get(str(context.info_name))
        if job is not None:
            lines += ["", f"It reads {listed([f'`{table}`' for table in job.tables])}."]
    return "\n".join(lines) + "\n"


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# APIs


def apis() -> str:
    known = schema()
    releases = served_versions()
    names = list(releases)
    groups = ", ".join(f"`{name}`" for name in GROUPS)
    lines = [
        APIS.format(first=names[0], last=names[-1], groups=groups),
        "| key | API | versions | flexible | served by | group | addresses |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, api in sorted(known.apis.items()):
        serving = [name for name in names if key in releases[name]]
        served = "" if not serving else serving[0] if len(serving) == 1 else f"{serving[0]} to {serving[-1]}"
        cells = (
            str(key),
            api.name,
            spanned(api.request.versions),
            spanned(api.request.flexible_versions).partition(" ")[0],
            served,
            group_of(key) or "",
            "yes" if key in ADDRESS_CARRIERS else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# Rights


def rights() -> str:
    lines = [RIGHTS_PAGE, "| API | a broker requires | in | kproxy requires |", "|---|---|---|---|"]
    for api in sorted(schema().apis.values(), key=lambda api: api.key):
        for right in RIGHTS[api.name]:
            of = f"{right.operation} on {_RESOURCES[right.resource]}"
            of += f", or {right.or_cluster} on the cluster" if right.or_cluster else ""
            place = ", ".join(f"`{field}`" for field in right.fields)
            first = max(right.versions[0], api.request.versions[0])
            last = min(right.versions[-1], api.request.versions[-1])
            versions = "" if (first, last) == (0, api.request.versions[-1]) else f"v{spanned(range(first, last + 1))}"
            where = "; ".join(part for part in (place, right.when, versions) if part)
            lines.append(f"| {api.name} | {of} | {cell(where)} | {asked(api.name, right)} |")
        if not RIGHTS[api.name]:
            group = group_of(api.key)
            lines.append(f"| {api.name} | nothing | | {'nothing' if group == 'always' else 'a rule without names'} |")
    return "\n".join(lines) + "\n"


ALSO_OPERATIONS = {"CreateTopics": "Create", "DescribeConfigs": "DescribeConfigs"}
_RESOURCES = {
    "topic": "the topic",
    "group": "the group",
    "transactional_id": "the transactional id",
    "cluster": "the cluster",
    "user": "the user",
    "delegation_token": "the token",
}


def asked(api: str, right: Right) -> str:
    """The rule that kproxy asks for."""
    resource = _RESOURCES[right.resource]
    if right.operation == "TwoPhaseCommit":
        return "a rule without names"
    if right.resource in PLAIN_KINDS:
        if api in ALSO and right.operation == ALSO_OPERATIONS[ALSO[api][0]] and right.fields:
            other = f"a rule that allows {ALSO[api][0]} of {resource}"
            less = {"Metadata": "else the flag is cleared", "CreateTopics": "else the answer is without them"}
            return f"{other}, {less[api]}" if api in less else other
        if right.fields:
            return f"a rule that allows {resource}" + ("; one for every topic" if "Regex" in right.fields[0] else "")
        return "a rule that allows some topic" if api == "InitProducerId" else "the same, else the answer is without it"
    if right.operation != CLUSTER_ACTION:
        return "a rule without names"
    return "a rule for brokers" if api in GROUPS["broker"] else "a rule for brokers: `broker`"


def spanned(versions: range) -> str:
    if not versions:
        return ""
    return f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


# Columns


def columns() -> str:
    lines = [COLUMNS]
    for name, table in tables_schema.BY_NAME.items():
        lines += ["", f"## {name}", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        for field in table.schema:
            kind = str(field.type).replace("timestamp[us, tz=UTC]", "timestamp") + (
                "" if field.nullable else ", never null"
            )
            text = cell(escaped(meanings.meaning(name, field.name) or ""))
            lines.append(f"| {field.name} | {cell(kind)} | {meanings.unit(field.name) or ''} | {text} |")
    return "\n".join(lines) + "\n"


# Statements


def statements() -> str:
    """Each table in Spark's SQL, to be created before there are data."""
    found = [STATEMENTS]
    for name, table in tables_schema.BY_NAME.items():
        lines = []
        for field in table.schema:
            meaning, unit = meanings.meaning(name, field.name) or "", meanings.unit(field.name)
            text = f"{meaning}, in {unit}" if unit else meaning
            never_null = "" if field.nullable else " not null"
            comment = text.replace("\\", "\\\\").replace("'", "\\'")
            lines.append(f"  `{field.name}` {spark_type(field)}{never_null} comment '{comment}'")
        by_hour = "time" in table.schema.names
        lines += ["  `date` string", "  `hour` string"] if by_hour else []
        partitioned = "\npartitioned by (`date`, `hour`)" if by_hour else ""
        columns = ",\n".join(lines)
        found.append(f"create table {name} (\n{columns}\n)\nusing parquet{partitioned};\n")
    return "\n".join(found)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
