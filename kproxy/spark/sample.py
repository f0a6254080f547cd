"""A small synthetic capture, with which an ingest runs every step that it runs on a large capture."""

from pathlib import Path

from kproxy.flight.packets import PacketFile
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import BROKER, CLIENT

EXCHANGES = 200
SPLIT_BYTES = 8 << 10  # small enough to divide the sample into several splits
_VERSION = 3
_BEGIN_NS, _STEP_NS = 1_700_000_000_000_000_000, 1_000_000


def write(path: Path) -> None:
    """Write a capture of one connection with EXCHANGES ApiVersions requests."""
    info = ConnectionInfo("default", path.name, "127.0.0.2", 40_000, "127.0.0.1", 9092, None, _BEGIN_NS)
    request = {"clientSoftwareName": "kproxy", "clientSoftwareVersion": "1"}
    answer = {"apiKeys": [{"apiKey": API_VERSIONS, "minVersion": 0, "maxVersion": _VERSION}]}
    with path.open("wb") as file:
        packets = PacketFile(file)
        stream = packets.stream(info)
        stream.begin(_BEGIN_NS)
        for number in range(EXCHANGES):
            now_ns = _BEGIN_NS + (number + 1) * _STEP_NS
            header = {"requestApiKey": API_VERSIONS, "requestApiVersion": _VERSION, "correlationId": number}
            asked = codec.encode_request({**header, "clientId": "sample"}, request)
            answered = codec.encode_response(API_VERSIONS, _VERSION, {"correlationId": number}, answer)
            for side, frame, at_ns in ((CLIENT, asked, now_ns), (BROKER, answered, now_ns + _STEP_NS // 2)):
                whole = len(frame).to_bytes(4) + frame
                stream.frame(side, at_ns, at_ns, whole, len(whole), "")
        stream.end(_BEGIN_NS + (EXCHANGES + 1) * _STEP_NS)
        packets.close()
