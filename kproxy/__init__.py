"""kproxy: a protocol-aware proxy for Apache Kafka and an analyser of its traffic.

The public API is what `__all__` names; everything else may change with any release. Names are loaded when they are
used: `import kproxy` loads no other module.

decode_request, decode_response    a frame as (header, body), dicts by the field names of Kafka's message definitions
encode_request, encode_response    the inverse
read_batches                       record batches and message sets, with their records
exchanges                          the requests of a capture with their answers; needs the extra `offline`
Proxy                              a proxy inside a program
KproxyError and what is below it   all that kproxy raises on purpose, see `kproxy.errors`
"""

TYPE_CHECKING = False  # as type checkers know it; to import it would be the longest part of starting a program
if TYPE_CHECKING:
    from kproxy.convert.reading import exchanges
    from kproxy.errors import (
        CaptureError,
        ConfigError,
        KproxyError,
        Malformed,
        ProtocolError,
        Unsupported,
        UpstreamError,
    )
    from kproxy.protocol.codec import decode_request, decode_response, encode_request, encode_response
    from kproxy.protocol.records import read_batches
    from kproxy.proxy.process.embedded import Proxy

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "ConfigError",
    "KproxyError",
    "Malformed",
    "ProtocolError",
    "Proxy",
    "Unsupported",
    "UpstreamError",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
    "exchanges",
    "read_batches",
]

_MODULE_OF = {
    "Proxy": "kproxy.proxy.process.embedded",
    "decode_request": "kproxy.protocol.codec",
    "decode_response": "kproxy.protocol.codec",
    "encode_request": "kproxy.protocol.codec",
    "encode_response": "kproxy.protocol.codec",
    "exchanges": "kproxy.convert.reading",
    "read_batches": "kproxy.protocol.records",
}


if not TYPE_CHECKING:  # a type checker that saw it would take every name for one of ours

    def __getattr__(name: str):
        if name not in __all__:
            raise AttributeError(f"module 'kproxy' has no attribute {name!r}")
        from importlib import import_module

        from kproxy.errors import missing_package

        try:
            value = getattr(import_module(_MODULE_OF.get(name, "kproxy.errors")), name)
        except ModuleNotFoundError as fault:
            if (missing := missing_package(fault.name)) is None:
                raise
            raise ModuleNotFoundError(f"kproxy.{name} {missing}", name=fault.name) from fault
        globals()[name] = value  # the next access does not come here
        return value


def __dir__() -> list[str]:
    from importlib.util import find_spec

    names = {*globals(), *__all__}
    if not (find_spec("numpy") and find_spec("pyarrow")):
        names.discard("exchanges")  # help() loads every name that is here, and ends where one cannot be
    return sorted(names)
