"""Reads the settings of `kproxy run`: from a TOML file, the environment and flags; the later wins.

Every fault is reported at once, each with where its value came from (a flag, a variable, a place in the file). A flag
`--broker-port-base` is the variable KPROXY_BROKER_PORT_BASE and the key `broker_port_base` of the file. Flags and
variables describe the cluster where there is one; several are told apart only in the file, one `[[cluster]]` each.
Refuses to know what the settings mean.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kproxy.errors import ConfigError
from kproxy.proxy.config.checks import cluster_faults, shared_faults
from kproxy.proxy.config.model import model_in
from kproxy.proxy.config.settings import CLUSTER_SETTINGS, PROCESS_SETTINGS, Cluster, Config

Faults = list[tuple[str, str]]
Model = TypeVar("Model", bound=BaseModel)


def load(
    file: Path | str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """The settings, or ConfigError with every fault. `flags` holds names as in the file; None means not given."""
    environment = environment or {}
    file = file or environment.get("KPROXY_CONFIG") or None
    document = _read(Path(file)) if file else {}
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
    if len(tables) > 1:
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
    if faults or process is None:
        raise ConfigError(faults)
    return process


def _mistyped(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that begin as ours do and are none, but those that Kubernetes sets for a Service called kproxy."""
    known = ["KPROXY_CONFIG", *(f"KPROXY_{name.upper()}" for name in (*CLUSTER_SETTINGS, *PROCESS_SETTINGS))]
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
    """Names the place of a setting: the flag or variable that set it, else its place in the file."""

    def __init__(self, prefix: str, origins: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._origins = origins

    def __call__(self, *location: str | int) -> str:
        name, *rest = location or ("",)
        inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
        origin = self._origins.get(str(name))
        return f"{origin}{inner}" if origin else f"{self._prefix}{name}{inner}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as fault:
        raise ConfigError([("--config", f"{path} cannot be read: {fault.strerror or fault}")]) from None
    except UnicodeDecodeError as fault:
        raise ConfigError([(str(path), f"not valid TOML: {fault}")]) from None
    except tomllib.TOMLDecodeError as fault:
        hint = "; strings need quotes" if "Invalid value" in str(fault) else ""
        raise ConfigError([(str(path), f"not valid TOML: {fault}{hint}")]) from None


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _validated(
    model: type[Model], values: Mapping[str, Any], paths: _Paths, faults: Faults, misplaced: Iterable[str] = ()
) -> Model | None:
    """The model, or None and faults. misplaced: settings of a cluster that stand above all [[cluster]] of the file."""
    try:
        return model.model_validate(values)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            location = error["loc"]
            name = str(location[0]) if location else ""
            if error["type"] == "missing" and name in misplaced:
                text = ""
            elif error["type"] == "missing" and name in CLUSTER_SETTINGS and len(location) == 1:
                flag = f"--{name.replace('_', '-')}"
                text = f"is missing: give {flag} HOST:PORT, KPROXY_{name.upper()} or, in [[cluster]], {name}"
            elif error["type"] == "extra_forbidden" and model is Config and name in Cluster.model_fields:
                text = "belongs in [[cluster]]: put it below that line, of the cluster that it is about"
            elif error["type"] == "extra_forbidden":
                text = _no_such_setting(str(location[-1]), _model_at(model, location[:-1]))
            else:
                text = _in_our_words(error)
            if text:
                faults.append((paths(*location), text))
        return None


def _model_at(model: type[BaseModel], location: tuple[str | int, ...]) -> type[BaseModel]:
    """The model of the table at that place of the file."""
    for part in location:
        field = model.model_fields.get(str(part))
        inner = model_in(field.annotation) if field is not None else None
        model = inner or model
    return model


def _no_such_setting(name: str, model: type[BaseModel]) -> str:
    """What to write in place of a key of the file that is none."""
    of_file = ["cluster" if one == "clusters" else one for one in model.model_fields]
    names = [*of_file, *(CLUSTER_SETTINGS if model is Config else ())]
    near = difflib.get_close_matches(name.replace("-", "_"), names, 1)
    if not near:
        return f"no such setting; there are: {', '.join(of_file)}"
    if model is Config and near[0] == "cluster":
        return "no such setting; did you mean [[cluster]]?"
    where = " of [[cluster]]" if model is Config and near[0] not in of_file else ""
    return f"no such setting; did you mean {near[0]}{where}?"


def _in_our_words(error: ErrorDetails) -> str:
    """What pydantic found, with the value that it found it in; nothing where that has been told of its parts."""
    value = error["input"]
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if {"login", "authentication"} & set(error["loc"]):  # a secret may stand where none belongs: not repeated
        return "is missing" if error["type"] == "missing" else error["msg"]
    match error["type"]:
        case "missing":
            return "is missing"
        case "int_parsing" | "int_type":
            return f"{value!r} is not a whole number"
        case "too_short":
            return "" if value else "is empty"
        case "tuple_type":
            return f"{value!r} should be a list"
    return re.sub(r"^(Input|String)\b", lambda _: repr(value), error["msg"])
