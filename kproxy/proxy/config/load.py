"""Reads the settings of `kproxy run`: from a TOML file, the environment and flags; the later source wins.

It reports all faults together, each with the source of its value (a flag, a variable, a place in the file). A flag
`--broker-port-base` is the variable KPROXY_BROKER_PORT_BASE and the key `broker_port_base` of the file. Flags and
variables describe the only cluster; several clusters need the file, with a `[[cluster]]` for each. Refuses to know the
meaning of settings.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kproxy.errors import ConfigError
from kproxy.proxy.config.checks import cluster_faults, shared_faults
from kproxy.proxy.config.model import model_in
from kproxy.proxy.config.settings import CLUSTER_SETTINGS, PROCESS_SETTINGS, Cluster, Config
from kproxy.proxy.config.zookeeper import zookeeper_faults

Faults = list[tuple[str, str]]

_TOML_HINTS = {  # message of tomllib: the probable mistake
    "Invalid value": "texts need quotes",
    "Expected newline": "texts need quotes",
    "Illegal character '\\n'": "a text ends on its line, with a quote",
    "Cannot overwrite": "it stands twice",
    "Expected '=' after a key": "write NAME = VALUE, and tables as [NAME]",
}
_SINGLE_TABLE = re.compile(r"^[ \t]*\[[ \t]*cluster[ \t]*\]", re.MULTILINE)  # a common mistake for [[cluster]]
Model = TypeVar("Model", bound=BaseModel)


def load(
    file: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Config:
    """Return the settings. Raises ConfigError with every fault. flags: by the names of the file; None: not given.

    given: the settings of a program without a file, in the form that a file would give them.
    """
    environment = environment or {}
    file = file or environment.get("KPROXY_CONFIG") or None
    document = _read(Path(file)) if file else dict(given or {})
    where = f"{file}: " if file else ""
    faults: Faults = []

    tables = document.pop("cluster", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError([(f"{where}cluster", "write it as [[cluster]], one for each")])
    origins: dict[str, str] = {}
    overrides: dict[str, Any] = {}
    for name in (*CLUSTER_SETTINGS, *PROCESS_SETTINGS):
        variable = f"KPROXY_{name.upper()}"
        if (flags or {}).get(name) is not None:
            overrides[name], origins[name] = (flags or {})[name], f"--{name.replace('_', '-')}"
        elif environment.get(variable):
            overrides[name], origins[name] = environment[variable], variable

    faults += _mistyped(environment)
    if not tables and document.get("zookeeper") and not overrides.keys() & set(CLUSTER_SETTINGS):
        faults.append((f"{where}cluster", "is missing: [[zookeeper]] is served beside one [[cluster]] at least"))
    elif len(tables) > 1:
        faults += [
            (origins[name], f"which of the {len(tables)} clusters of {file}? set {name} in the file")
            for name in CLUSTER_SETTINGS
            if name in overrides
        ]
    else:
        tables = [{**(tables[0] if tables else {}), **_only(overrides, CLUSTER_SETTINGS)}]

    clusters: list[Cluster] = []
    sound: list[Cluster] = []
    misplaced = document.keys() & set(CLUSTER_SETTINGS)
    if any(_near(name, ["cluster"]) for name in document):
        misplaced |= set(CLUSTER_SETTINGS)  # their table has a wrong name, which is reported as a fault of its own
    for number, table in enumerate(tables):
        paths = _Paths(f"{where}cluster[{number}]." if file else "", origins if len(tables) == 1 else {})
        cluster = _validated(Cluster, table, paths, faults, misplaced)
        if cluster is not None:
            clusters.append(cluster)
            found = [(paths(name), text) for name, text in cluster_faults(cluster)]
            faults += found
            if not found:
                sound.append(cluster)
    paths = _Paths(where, origins)
    process = _validated(Config, {**document, **_only(overrides, PROCESS_SETTINGS), "cluster": clusters}, paths, faults)
    faults += shared_faults(sound, process.admin if process else None)
    if process is not None and process.zookeeper:
        taken = [cluster.listen for cluster in sound] + ([process.admin] if process.admin is not None else [])
        faults += [(paths(place), text) for place, text in zookeeper_faults(process.zookeeper, taken)]
    if process is not None and process.admin is None:
        for name in ("admin_tls", "admin_token_file"):
            from_variable = paths(name).startswith("KPROXY_")  # `kproxy ctl` reads the variable of admin_token_file too
            if getattr(process, name) is not None and not from_variable:
                faults.append((paths(name), "says nothing without admin"))
    if faults or process is None:
        raise ConfigError(faults)
    return process


def _mistyped(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield unknown variables that begin with KPROXY_, except those of Kubernetes for a Service named kproxy."""
    known = [
        "KPROXY_CONFIG",
        "KPROXY_CORE",
        *(f"KPROXY_{name.upper()}" for name in (*CLUSTER_SETTINGS, *PROCESS_SETTINGS)),
    ]
    services = [name.removesuffix("SERVICE_HOST") for name in environment if name.endswith("_SERVICE_HOST")]
    for variable in sorted(environment):
        if not variable.startswith("KPROXY_") or variable in known:
            continue
        if any(variable.startswith((f"{one}SERVICE_", f"{one}PORT_")) or variable == f"{one}PORT" for one in services):
            continue
        suffixes = [name.removeprefix("KPROXY_") for name in known]
        near = difflib.get_close_matches(variable.removeprefix("KPROXY_"), suffixes, 1)
        hint = f"did you mean KPROXY_{near[0]}?" if near else f"there are: {', '.join(known)}"
        yield variable, f"no such setting; {hint}"


class _Paths:
    """Returns the place of a setting: the flag or variable that set it, else its place in the file."""

    def __init__(self, prefix: str, origins: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._origins = origins

    def __call__(self, *location: str | int) -> str:
        name, *rest = location or ("",)
        inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
        origin = self._origins.get(str(name))
        return f"{origin}{inner}" if origin else f"{self._prefix}{name}{inner}"


def _read(path: Path) -> dict[str, Any]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
        return tomllib.loads(text)
    except OSError as fault:
        raise ConfigError([(str(path), f"cannot be read: {fault.strerror or fault}")]) from None
    except UnicodeDecodeError as fault:
        if b"\0" in fault.object:
            raise ConfigError([(str(path), "no text, but bytes: name kproxy's configuration, a TOML file")]) from None
        raise ConfigError([(str(path), f"not valid TOML: save it as UTF-8: {fault}")]) from None
    except tomllib.TOMLDecodeError as fault:
        hints = [hint for said, hint in _TOML_HINTS.items() if said in str(fault)]
        if "Cannot " in str(fault) and _SINGLE_TABLE.search(text):
            hints = ["write each [cluster] as [[cluster]], with two brackets"]
        raise ConfigError([(str(path), "; ".join((f"not valid TOML: {fault}", *hints)))]) from None


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _validated(
    model: type[Model], values: Mapping[str, Any], paths: _Paths, faults: Faults, misplaced: Iterable[str] = ()
) -> Model | None:
    """Return the model, or None and faults. misplaced: settings of a cluster above all [[cluster]] of the file."""
    try:
        return model.model_validate(values)
    except ValidationError as found:
        errors = found.errors(include_url=False)
        for error in errors:
            location = error["loc"]
            name = str(location[0]) if location else ""
            if error["type"] == "missing" and (name in misplaced or _is_mistyped(model, location, errors)):
                text = ""
            elif error["type"] == "missing" and name in CLUSTER_SETTINGS and len(location) == 1:
                flag = f"--{name.replace('_', '-')}"
                text = f"is missing: give {flag} HOST:PORT, KPROXY_{name.upper()} or, in [[cluster]], {name}"
            elif error["type"] == "extra_forbidden":
                text = _no_such_setting(model, location)
            elif error["type"] in ("model_type", "tuple_type") and model_in(_annotation(model, location)) is not None:
                text = f"write it as {_written(model, location)}"
            else:
                text = _in_our_words(error)
            if text:
                faults.append((paths(*location), text))
        return None


def _is_mistyped(model: type[BaseModel], location: tuple[str | int, ...], errors: list[ErrorDetails]) -> bool:
    """Whether a missing key is in the same table with another spelling, which is reported as a fault of its own."""
    names = [*_model_at(model, location[:-1]).model_fields]
    return any(
        error["type"] == "extra_forbidden"
        and error["loc"][:-1] == location[:-1]
        and _near(str(error["loc"][-1]), names) == location[-1]
        for error in errors
    )


def _annotation(model: type[BaseModel], location: tuple[str | int, ...]) -> Any:
    """Return the type of the field at that place of the file."""
    *above, last = [part for part in location if isinstance(part, str)]
    field = _model_at(model, tuple(above)).model_fields.get(last)
    return field.annotation if field is not None else None


def _model_at(model: type[BaseModel], location: tuple[str | int, ...]) -> type[BaseModel]:
    """Return the model of the table at that place of the file."""
    for part in location:
        field = model.model_fields.get(str(part))
        inner = model_in(field.annotation) if field is not None else None
        model = inner or model
    return model


def _written(model: type[BaseModel], location: tuple[str | int, ...]) -> str:
    """Return the header of the table at that place: [cluster.tls], or [[cluster.policy]] if there can be several."""
    path = ".".join([*(["cluster"] if model is Cluster else []), *(part for part in location if isinstance(part, str))])
    several = get_origin(_annotation(model, location)) is tuple
    return f"[[{path}]], one for each" if several else f"[{path}]"


def _tables(model: type[BaseModel], header: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield (header, model) of every table that a file can have."""
    yield header, model
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is not None:
            path = "cluster" if name == "clusters" else f"{header.strip('[]')}.{name}".lstrip(".")
            yield from _tables(inner, f"[[{path}]]" if get_origin(field.annotation) is tuple else f"[{path}]")


def _near(name: str, names: Sequence[str], likeness: float = 0.6) -> str | None:
    """Return the name that the user probably meant; None if no name is similar."""
    name = name.replace("-", "_")
    near = difflib.get_close_matches(name, names, 1, likeness)
    near = near or [one for one in names if len(name) > 2 and one.startswith(name)]
    return near[0] if near else None


def _no_such_setting(model: type[BaseModel], location: tuple[str | int, ...]) -> str:
    """Return the remedy for an unknown key of the file."""
    name, table = str(location[-1]), _model_at(model, location[:-1])
    elsewhere = [(header, one) for header, one in _tables(Config, "") if name in one.model_fields and one is not table]
    if table is Config and name in Cluster.model_fields:
        if model_in(Cluster.model_fields[name].annotation) is not None:
            return f"belongs in [[cluster]]: write it as {_written(Cluster, (name,))}, below that line"
        return "belongs in [[cluster]]: put it below that line, of the cluster that it is about"
    if elsewhere and _near(name, [*table.model_fields], 0.85) is None:
        above = [one for one in elsewhere if one[1] is Config]
        if above and model_in(Config.model_fields[name].annotation) is not None:
            return f"no such setting here; write it as [{name}]"
        places = ["above the first [[cluster]]"] if above else []
        places += [f"in {header}" for header, one in elsewhere if one is not Config]
        return f"belongs {' or '.join(places)}"
    of_file = ["cluster" if one == "clusters" else one for one in table.model_fields]
    near = _near(name, [*of_file, *(CLUSTER_SETTINGS if table is Config else ())])
    if near is None:
        return f"no such setting; there are: {', '.join(of_file)}"
    if table is Config and near == "cluster":
        return "no such setting; did you mean [[cluster]]?"
    where = " of [[cluster]]" if table is Config and near not in of_file else ""
    return f"no such setting; did you mean {near}{where}?"


def _in_our_words(error: ErrorDetails) -> str:
    """Return the text of a fault that pydantic found, with its value; "" if its parts have faults of their own."""
    value, kind = error["input"], error["type"]
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, ")
    # Do not repeat a value of these tables: a user may have put a secret into any of their settings.
    may_be_secret = bool({"login", "authentication"} & set(error["loc"]))
    shown = "it" if may_be_secret else str(value).lower() if isinstance(value, bool) else repr(value)
    if kind == "literal_error" and not isinstance(value, (str, bool)) and f"'{value}'" in error["msg"]:
        kind = "string_type"
    match kind:
        case "missing":
            return "is missing"
        case "too_short" | "string_too_short":
            return "" if value else "is empty"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{shown} is not a whole number"
        case "float_parsing" | "float_type":
            return f"{shown} is not a number" + (" of seconds" if str(error["loc"][-1]).endswith("_s") else "")
        case "bool_parsing" | "bool_type":
            return f"{shown} is neither true nor false"
        case "string_type":
            return f"{shown} is no text: put it into quotes"
        case "tuple_type":
            return f"{shown} should be a list: put it into [ ]"
        case "string_pattern_mismatch" if error["loc"][-1] == "name":
            return f"{shown}: a name has letters, digits, '.', '_' and '-'"
    return re.sub(r"^(Input|String)\b", lambda _: shown, error["msg"])
