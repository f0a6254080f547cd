"""The options for reading captures and showing frames, shared by every command that does either.

Duty: one spelling, one help text and one default for each. A connection's id depends on some of them, so that commands
which look one up must be given what the command that named it was given. Refuses to know what is done with captures.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from kproxy.errors import KproxyError

if TYPE_CHECKING:
    from kproxy.convert.job import Settings
    from kproxy.tables.records import Chosen

_PORT = click.IntRange(1, 65535)

OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--port",
        "ports",
        type=_PORT,
        multiple=True,
        metavar="N",
        help="Port of a broker; may be repeated. Default: Kafka is recognised by its content, on any port.",
    ),
    click.option(
        "--zookeeper-port",
        "zookeeper_ports",
        type=_PORT,
        multiple=True,
        metavar="N",
        help="Port of ZooKeeper; may be repeated. Default: ZooKeeper is recognised by its content, on any port.",
    ),
    click.option(
        "--cluster", default="default", show_default=True, metavar="NAME", help="Value of the column `cluster`."
    ),
    click.option(
        "--rotated",
        is_flag=True,
        help="The files are parts of one capture; they are read in the order of their packets.",
    ),
    click.option(
        "--key-log",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="SSLKEYLOGFILE that decrypts the TLS connections; needs tshark.",
    ),
    click.option(
        "--storage-option",
        "storage_options",
        multiple=True,
        metavar="KEY=VALUE",
        help="Option of fsspec for s3://, gs://, abfs:// or webhdfs://; may be repeated.",
    ),
)
SHOWN: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--records-shown",
        type=click.IntRange(0),
        default=10,
        show_default=True,
        metavar="N",
        help="Records shown of each batch.",
    ),
    click.option("--show-secrets", is_flag=True, help="Show SASL tokens, HMACs, SCRAM credentials and passwords."),
)
VALUES = "64"  # the default of --record-values
NAMES = ("ports", "zookeeper_ports", "cluster", "rotated", "key_log", "storage_options")  # the parameters


def options(function: Any) -> Any:
    """Add the options for reading captures to a function."""
    return _with(OPTIONS, function)


def shown(function: Any) -> Any:
    """Add the options for showing frames to a function."""
    return _with(SHOWN, function)


def _with(options: tuple[Callable[[Any], Any], ...], function: Any) -> Any:
    for option in reversed(options):
        function = option(function)
    return function


def taken(given: dict[str, Any]) -> dict[str, Any]:
    """Those of a command's parameters that are these options, taken out of `given`."""
    return {name: given.pop(name) for name in NAMES}


def settings(how: Mapping[str, Any], **more: Any) -> "Settings":
    """Settings from these options, as `taken` gives them; `more`: more fields. Raises KproxyError like `Settings`."""
    from kproxy.capture.formats.storage import Storage, options_of
    from kproxy.convert.job import Settings

    fields = {name: how[name] for name in NAMES}
    storage = Storage(options_of(fields.pop("storage_options")))
    return Settings(**fields, storage=storage, **more)


def records(topics: str | None, values: str) -> "Chosen | None":
    """The choice of `--records` and `--record-values`; raises KproxyError for an invalid one."""
    from kproxy.tables.records import chosen

    if topics is None and values != VALUES:
        raise KproxyError("--record-values says what is shown of the topics of --records: name them too")
    return None if topics is None else chosen(topics, values)
