"""`kproxy decode`: the machine form against every vector, and how the bytes of a frame are found."""

import gzip
import json
import re
import struct
import subprocess
import sys
import tracemalloc
from base64 import b64encode, encodebytes
from itertools import islice
from pathlib import Path

import crc32c
import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kproxy.cli import cli
from kproxy.errors import Malformed, ProtocolError, Unsupported
from kproxy.protocol.codec import encode_request
from kproxy.protocol.records import Record, write_batch
from kproxy.protocol.shown import decode
from tests import captures

COMMAND = (sys.executable, "-c", "from kproxy.cli import main; main()", "decode")
DATA = Path(__file__).parents[2] / "data"


def lines_of(name):
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def kproxy_decode(*arguments, lines):
    """Run a real process; return its output lines."""
    text = "\n".join(map(json.dumps, lines)).encode()
    done = subprocess.run([*COMMAND, *arguments], input=text, capture_output=True, check=True, timeout=120)
    assert done.stderr == b""
    return [json.loads(line) for line in done.stdout.splitlines()]


def run(*arguments, input=None):
    return CliRunner().invoke(cli, ["decode", *arguments], input=input, catch_exceptions=False)


def answered(line, work):
    return json.loads("".join(decode.answer(line, work)))


def test_every_vector_through_the_machine_form():
    vectors = lines_of("vectors-dev.jsonl.gz")
    asked = []
    for vector in vectors:
        line = {"side": vector["dir"], "hex": vector["hex"]}
        if vector["dir"] == "response":
            line |= {"api_key": vector["api_key"], "api_version": vector["version"]}
        elif vector["dir"] == "data":
            line["message"] = vector["api"]
        asked.append(line)
    answers = kproxy_decode("--jsonl", lines=asked)
    assert len(answers) == len(vectors) == 2409
    for vector, answer in zip(vectors, answers, strict=True):
        assert list(answer) == ["header", "body"], vector["api"]
        assert answer["body"] == vector["json"]
        header = answer["header"]
        if vector["dir"] == "data":
            assert len(header) == 1
            continue
        assert header["correlationId"] == vector["correlation_id"]
        if vector["dir"] == "request":
            assert (header["requestApiKey"], header["requestApiVersion"]) == (vector["api_key"], vector["version"])
            assert header.get("clientId") == vector["client_id"]


def test_all_records_through_the_machine_form():
    fragments = lines_of("records-dev.jsonl.gz")
    answers = kproxy_decode("--records", "--jsonl", lines=[{"hex": fragment["hex"]} for fragment in fragments])
    assert answers == [{name: fragment[name] for name in ("batches", "trailing_bytes")} for fragment in fragments]


def test_a_bad_line_is_an_error_of_its_own_and_the_rest_goes_on():
    good = {"side": "request", "hex": "00120000000000070003666f6f"}
    bad = [
        [],
        {},
        {"side": "request"},
        {"side": "request", "hex": 5},
        {"side": "request", "hex": "0"},
        {"side": "request", "hex": "zz"},
        {"side": "request", "hex": "0012"},
        {"side": "request", "hex": "006300000000000100"},
        {"side": "response", "hex": "00000007"},
        {"side": "response", "hex": "00000007", "api_key": "3", "api_version": 1},
        {"side": "response", "hex": "00000007", "api_key": 3, "api_version": 99},
        {"side": "data", "hex": "0000", "message": "NoSuchThing"},
        {"side": "elsewhere", "hex": "00"},
    ]
    answers = kproxy_decode("--jsonl", lines=[*bad, good])
    assert [list(answer) for answer in answers] == [["error"]] * len(bad) + [["header", "body"]]
    assert all(answer["error"] for answer in answers[:-1])
    assert "error" in answered(b"not json", decode.answer_frame)
    assert "error" in answered(b"\xff\xfe", decode.answer_frame)
    assert "error" in answered("[" * 100_000, decode.answer_frame)
    assert "error" in answered('{"hex": "ff"}', lambda asked: decode.answer_records({}))


@given(
    st.sampled_from(("request", "response", "data")), st.integers(-1, 95), st.integers(-1, 20), st.binary(max_size=60)
)
def test_any_bytes_get_an_answer(side, api_key, version, content):
    asked = {
        "side": side,
        "hex": content.hex(),
        "api_key": api_key,
        "api_version": version,
        "message": "GroupMetadataKey",
    }
    assert set(answered(json.dumps(asked), decode.answer_frame)) in ({"header", "body"}, {"error"})


def test_unknown_tags_and_trailing_bytes_are_in_the_answer():
    frame = "0012000300000007ffff00" + "0261" + "0262" + "01050178" + "ffff"
    answer = answered(json.dumps({"side": "request", "hex": frame}), decode.answer_frame)
    assert answer["body"]["_tags"] == {"5": "eA=="}
    assert answer["body"]["_trailing"] == "//8="


@pytest.mark.parametrize(
    "given_bytes",
    [
        *(b"0012ff00", b"0x0012FF00\n", b" 00 12:ff\r\n00 ", b"\x00\x12\xff\x00", b"00:12:ff:00"),
        *(b"0x00, 0x12, 0xFF, 0x00", b"0x0,0X12,0xff,0x0,\n", rb"\x00\x12\xff\x00", rb"\x0\x12\xff\x0"),
        *("\ufeff0012ff00\r\n".encode(encoding) for encoding in ("utf-8", "utf-16-le", "utf-16-be")),
    ],
)
def test_hex_in_the_forms_that_tools_print_and_binary(given_bytes):
    assert decode.bytes_of(given_bytes) == b"\x00\x12\xff\x00"


XXD = """00000000: 0000 000f 000c 0000 0000 0001 0001 6100  ..............a.
00000010: 7879 7a                                  xyz
"""
HEXDUMP = """00000000  00 00 00 0f 00 0c 00 00  00 00 00 01 00 01 61 00  |..............a.|
00000010  78 79 7a                                          |xyz|
00000013
"""
TSHARK = """0000  00 00 00 0f 00 0c 00 00 00 00 00 01 00 01 61 00   ..............a.
0010  78 79 7a                                          xyz
"""


OD = """0000000 00 00 00 0f 00 0c 00 00 00 00 00 01 00 01 61 00
0000020 78 79 7a
0000023
"""
OD_X = """000000 00 00 00 0f 00 0c 00 00 00 00 00 01 00 01 61 00
000010 78 79 7a
000013
"""
OD_D = """0000000 00 00 00 0f 00 0c 00 00 00 00 00 01 00 01 61 00  >..............a.<
0000016 78 79 7a                                         >xyz<
0000019
"""
WORDS = """0000000 0000 0f00 0c00 0000 0000 0100 0100 0061
0000020 7978 007a
0000023
"""


@pytest.mark.parametrize("dump", (XXD, XXD.replace("000000", "\t0x00"), HEXDUMP, TSHARK, OD, OD_X, OD_D, XXD.upper()))
def test_a_dump_with_offsets_and_characters_is_read(dump):
    expected = bytes.fromhex("0000000f000c000000000001000161 0078797a")
    assert decode.bytes_of(dump.encode()) == decode.bytes_of(dump.encode(), must_be_hex=True) == expected


@pytest.mark.parametrize("dump", (XXD, HEXDUMP, TSHARK, OD_D))
def test_a_dump_that_lacks_a_line_is_no_dump(dump):
    lines = dump.encode().splitlines(keepends=True)
    assert decode.bytes_of(b"".join(lines[1:])) == b"".join(lines[1:])


@pytest.mark.parametrize("dump", (WORDS, WORDS.replace("0000020", "0000010").replace("0000023", "0000013")))
def test_a_dump_of_words_whose_bytes_are_swapped_is_refused(dump):
    with pytest.raises(Malformed, match="16-bit words"):
        decode.bytes_of(dump.encode())


def test_base64_is_read_if_it_may_be_a_frame():
    frame = bytes.fromhex("0000000f000c000000000001000161 0078797a")
    assert decode.bytes_of(b64encode(frame)) == decode.bytes_of(b64encode(frame), must_be_hex=True) == frame
    assert decode.bytes_of(encodebytes(frame * 9)) == frame * 9  # in lines
    assert decode.bytes_of(b64encode(b"text")) == b64encode(b"text")


def test_invalid_hex_is_refused():
    with pytest.raises(Malformed, match="5 hexadecimal digits"):
        decode.bytes_of(b"0012f")
    with pytest.raises(Malformed, match="not hexadecimal: 'h' in '0x12 hello'"):
        decode.bytes_of(b"0x12 hello", must_be_hex=True)
    with pytest.raises(Malformed, match="1 hexadecimal digit: "):
        decode.bytes_of(b"0")
    with pytest.raises(Malformed, match="not hexadecimal: 'x' in '12x34'"):
        decode.bytes_of(b"12x34", must_be_hex=True)


@pytest.mark.parametrize("content", (b"\xff\xfe\0\1", b"\xff\xfe\0", b"\xef\xbb\xbf\xff", b"\xfe\xff0x"))
def test_bytes_that_begin_as_a_byte_order_mark_may_be_a_frame(content):
    assert decode.bytes_of(content) == content


def sized(frame):
    return len(frame).to_bytes(4, "big") + frame


FRAME = bytes.fromhex("0012000000000007ffff")
OTHER = bytes.fromhex("0012000000000008ffff")


def correlation_ids(given_bytes, sized=None, how=decode.request):
    return [found.header["correlationId"] for found in decode.frames(given_bytes, sized, how)]


def test_sizes_are_seen_or_told():
    assert correlation_ids(FRAME) == correlation_ids(sized(FRAME)) == correlation_ids(sized(FRAME), True) == [7]
    assert correlation_ids(FRAME, False) == [7]
    assert correlation_ids(sized(FRAME) + sized(OTHER)) == correlation_ids(sized(FRAME) + sized(OTHER), True) == [7, 8]
    for odd in (FRAME, b"", sized(FRAME) + b"\0", sized(FRAME)[:-1]):
        with pytest.raises(Malformed, match="not whole frames"):
            decode.frames(odd, True, decode.request)
    with pytest.raises(Malformed, match="Produce"):
        decode.frames(sized(FRAME), False, decode.request)  # a size of 10 is key 0, version 10


def test_a_correlation_id_that_looks_like_a_size():
    def heartbeat(frame):
        return decode.response(frame, 12, 1)

    answer = bytes.fromhex("00000006" + "00000000" + "0000")  # as sized: correlation id 0, and a body cut short
    assert correlation_ids(answer, how=heartbeat) == [6]
    assert correlation_ids(sized(answer), how=heartbeat) == [6]


def test_an_api_and_a_version_by_name_or_key():
    assert decode.api_and_version("Metadata:12") == decode.api_and_version("metadata:12") == (3, 12)
    assert decode.api_and_version("3:12") == (3, 12)
    for odd in ("Metadata", "Metadata:", "Metadata:x", "NoSuch:1", ":1", ""):
        with pytest.raises(Unsupported, match="API:VERSION"):
            decode.api_and_version(odd)


@pytest.mark.parametrize(
    ("wrong", "fix"),
    [
        ("ApiVersion:0", "did you mean ApiVersions"),
        ("metdata:1", "did you mean Metadata"),
        ("Metadata", "Metadata has 0 to 13"),
        ("3", "Metadata has 0 to 13"),
    ],
)
def test_what_is_nearly_an_api_is_guessed(wrong, fix):
    with pytest.raises(Unsupported, match=fix):
        decode.api_and_version(wrong)


def test_what_is_nearly_a_message_is_guessed():
    with pytest.raises(Unsupported, match="did you mean GroupMetadataKey"):
        decode.data(b"\0\0", "GroupMetadataKy")
    with pytest.raises(Unsupported, match=r"no message is called 'xyz'$"):
        decode.data(b"", "xyz")


METADATA = "00000019000300020000000500036170700000000100066f7264657273"
UNKNOWN = "0000000a0012006300000007ffff"  # ApiVersions v99
HEARTBEAT = "00000006000000050000"


@pytest.mark.parametrize(
    ("given", "response_to", "whole", "said"),
    [
        (METADATA + METADATA[:40], None, 1, "request 2: cut short"),
        (METADATA + METADATA + "0000", None, 2, "too long: what follows 2 whole requests, 2 bytes, is no request"),
        (METADATA + UNKNOWN, None, 1, "request 2: ApiVersions version 99 is not known"),
        (METADATA + UNKNOWN + METADATA, None, 1, "request 2: ApiVersions version 99 is not known"),
        (HEARTBEAT + HEARTBEAT[:14], "Heartbeat:0", 1, "response 2: cut short"),
        (HEARTBEAT + "0000", "Heartbeat:0", 1, "too long: what follows 1 whole response, 2 bytes, is no response"),
    ],
)
@pytest.mark.parametrize("sized", [None, True])
def test_whole_frames_before_a_fault_are_decoded(given, response_to, whole, said, sized):
    messages = decode.decoded(bytes.fromhex(given), sized=sized, response_to=response_to)
    assert [next(messages).header["correlationId"] for _ in range(whole)] == [5] * whole
    with pytest.raises(ProtocolError, match=f"^{said}"):
        next(messages)


@pytest.mark.parametrize("name", ["k41_BASE", "k41_tls13_keys"])
def test_a_capture_is_no_frame(name):
    path = captures.capture(name)
    assert decode.is_capture(path.read_bytes())
    for arguments in (["--file", str(path)], [str(path)]):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert "kproxy convert" in refused.stderr or "--exchange" in refused.stderr
    assert not decode.is_capture(FRAME) and not decode.is_capture(b"")


def test_hex_may_come_in_several_words():
    assert run("0012", "0000", "00000007", "0003666f6f").output == run("00120000000000070003666f6f").output


def test_json_masks_secrets_unless_asked(tmp_path):
    frame = "0024" + "0000" + "00000001" + "ffff" + "00000005" + b"\0a\0pw".hex()
    assert json.loads(run(frame, "--json").output)["body"] == {"authBytes": "(masked)"}
    assert json.loads(run(frame, "--json", "--show-secrets").output)["body"] == {"authBytes": "AGEAcHc="}
    file = tmp_path / "frame.bin"
    file.write_bytes(bytes.fromhex(frame))
    assert run("--file", str(file), "--json").output == run("--json", input=bytes.fromhex(frame)).output


def test_records_from_standard_input():
    batch = write_batch([Record(5, 1700000000000, b"k", None)], codec=4)
    found = json.loads(run("--records", "--json", input=batch).output)
    assert [record["offset"] for record in found["batches"][0]["records"]] == [5]


def test_records_are_printed_one_by_one():
    """A kilobyte of zstd is a million records, which as objects would fill a gigabyte."""
    count = 100_000
    records = zstandard.compress(bytes.fromhex("0c000000010100") * count)
    tail = struct.pack(">hiqqqhii", 4, count - 1, 0, 0, -1, -1, -1, count) + records
    batch = struct.pack(">qiibI", 0, len(tail) + 9, 0, 2, crc32c.crc32c(tail)) + tail
    tracemalloc.start()
    try:
        pieces = decode.answer_records({"hex": batch.hex()})
        first = "".join(islice(pieces, 1000))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert first.startswith('{"batches": [{"base_offset": 0, ')


def test_wrong_arguments_are_reported():
    both = run("00", "--records", "--response", "3:1")
    assert both.exit_code == 2 and "one of them" in both.output
    no_hex = subprocess.run([*COMMAND, "zz"], capture_output=True, text=True, timeout=60)
    assert no_hex.returncode == 2 and no_hex.stderr.startswith("kproxy: not hexadecimal: 'z' in 'zz';")
    answer = subprocess.run([*COMMAND, "000000070000"], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2 and "--response API:VERSION" in answer.stderr


def test_the_examples_of_the_help_run():
    examples = [line.split() for line in run("--help").output.splitlines() if line.startswith("    kproxy decode")]
    assert len(examples) == 8
    for example in examples:
        if not {"--file", "--jsonl", "--exchange", "--zookeeper"} & set(example):
            assert run(*example[2:]).exit_code == 0


def test_digits_may_be_more_than_the_name_of_a_file_can_have():
    names = [f"orders-{number:03d}" for number in range(400)]
    header = {"requestApiKey": 3, "requestApiVersion": 2, "correlationId": 5, "clientId": "app"}
    frame = encode_request(header, {"topics": [{"name": name} for name in names]})
    done = run("--json", (len(frame).to_bytes(4, "big") + frame).hex())
    assert done.exit_code == 0 and "orders-399" in done.output
    with pytest.raises(Malformed):
        run("--zookeeper", "00" * 3000)


@pytest.mark.parametrize(
    ("given", "name"),
    [("160301006e0100006a0303", "TLS"), ("15030300020228", "TLS"), (b"GET / HTTP/1.1".hex(), "HTTP")],
)
def test_bytes_of_another_protocol_are_told_as_such(given, name):
    with pytest.raises(Malformed, match=f"^no frame of Kafka: the bytes begin as {name} does$"):
        run(given)


@pytest.mark.parametrize("here", [12, 15, 24])
def test_a_request_that_is_cut_is_told_with_what_is_here(here):
    whole = bytes.fromhex("00000019000300020000000500036170700000000100066f7264657273")
    said = rf"^cut short: the size says 25 bytes, {here - 4} follow it: Metadata request v2, correlation id 5$"
    with pytest.raises(Malformed, match=said):
        list(decode.decoded(whole[:here]))
    (message,) = decode.decoded(whole)
    assert message.body["topics"] == [{"name": "orders"}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{0:.20}", "cut short: the size says 25 bytes, 6 follow it: Metadata request v2"),
        ("{0}00", "too long: what follows 1 whole request, 1 byte, is no request with its size"),
        ("00000008{1}", "too long: the size says 8 bytes, 25 follow it: Metadata request v2, correlation id 5"),
        ("{0}{0:.40}", "request 2: cut short: the size says 25 bytes, 16 follow it: Metadata request v2"),
        ("{0}{0}0000", "too long: what follows 2 whole requests, 2 bytes, is no request with its size"),
        ("{1:.36}", "as a request: MetadataRequest v2: cut short"),  # 0x00030002 is no size of it
        ("{1:.16}", "as a request: RequestHeader v1: cut short"),
        ("0003006300000005ffff00", "as a request: Metadata version 99 is not known"),
        ("27170000000000050003617070", "as a request: API key 10007 is not known"),
        ("00000000{1}", "too long: the size says 0 bytes, 25 follow it: Metadata request v2, correlation id 5"),
        ("ffffffff{1}", "as a request: API key -1 is not known"),
        ("{0}00000000{1}", "request 2: too long: the size says 0 bytes, 25 follow it: Metadata request v2"),
        ("{0}ffffffff{1}", "too long: what follows 1 whole request, 29 bytes, is no request with its size"),
        (
            "000000222717000000000007000361626300",
            "cut short: the size says 34 bytes, 14 follow it: unknown_10007 request",
        ),
        (
            "0000000927170000000000070003616263",
            "too long: the size says 9 bytes, 13 follow it: unknown_10007 request v0",
        ),
        (
            "0000001400120063000000070003666f6f",
            "cut short: the size says 20 bytes, 13 follow it: ApiVersions request v99",
        ),
        ("7fffffff{1:.16}", "cut short: the size says 2,147,483,647 bytes, 8 follow it: Metadata request v2"),
    ],
)
def test_requests_that_do_not_have_the_size_that_they_say_are_named(given, said):
    whole = "00000019000300020000000500036170700000000100066f7264657273"
    with pytest.raises(ProtocolError, match=f"^{said}"):
        list(decode.decoded(bytes.fromhex(given.format(whole, whole[8:]))))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("00000020{0}", "cut short: the size says 32 bytes, 16 follow it: ApiVersions response v0"),
        ("0000000c{0}", "too long: the size says 12 bytes, 16 follow it: ApiVersions response v0"),
        ("00000010{0}00000010{0:.8}", "response 2: cut short: the size says 16 bytes, 4 follow it: ApiVersions resp"),
        (
            "00000010{0}00000008{0}",
            "response 2: too long: the size says 8 bytes, 16 follow it: ApiVersions response v0",
        ),
        (
            "00000010{0:.28}",
            "ApiVersionsResponse v0: cut short: it does not end within its 14 bytes; with its first 4 bytes as its "
            "size: cut short: the size says 16 bytes, 14 follow it: ApiVersions response v0",
        ),
        ("{0:.24}", "ApiVersionsResponse v0: cut short: it does not end within its 8 bytes$"),
    ],
)
def test_responses_that_do_not_have_the_size_that_they_say_are_named(given, said):
    whole = "0000000700000000000100030000000d"
    with pytest.raises(Malformed, match=f"^{said}"):
        list(decode.decoded(bytes.fromhex(given.format(whole)), response_to="ApiVersions:0"))


def test_frames_are_those_whose_sizes_fill_the_input_from_end_to_end():
    """The shortest frame is a response without a body: its correlation id."""
    for sizes in ([4], [5], [4, 4], [100, 4, 7]):
        frames = [bytes([number]) * size for number, size in enumerate(sizes)]
        whole = b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)
        assert decode.sized_frames(whole) == frames
        for other in (whole[:-1], whole + b"\0", whole + struct.pack(">i", 4), whole[1:]):
            assert decode.sized_frames(other) is None
    for size in (-1, 0, 1, 3):
        assert decode.sized_frames(struct.pack(">i", size) + bytes(max(0, size))) is None


@pytest.mark.parametrize("size", range(4))
def test_fewer_than_four_bytes_are_no_request(size):
    assert decode._looks_like_request(bytes(size)) == 0


@pytest.mark.parametrize(
    ("frame", "found"),
    [
        ("00030002", 1),
        ("0003000e", 0),  # there is no Metadata v14
        ("03e80000", 0),
        ("000300020000000500", 1),
        ("0003000200000005ffff", 2),  # a client id that is null
        ("0003000200000005fffe", 1),  # none has this length
        ("00030002000000050000", 2),
        ("000300020000000500036170", 1),
        ("00030002000000050003617070", 2),
        ("0003000200000005000361707000", 2),
    ],
)
def test_how_much_of_a_request_is_there(frame, found):
    assert decode._looks_like_request(bytes.fromhex(frame)) == found


@pytest.mark.parametrize(("size", "may_be"), [(0xFFFF, False), (0x10000, True), (0x100FF, True), (0x10100, False)])
def test_a_size_that_reads_as_an_api_and_a_small_version(size, may_be):
    assert decode._may_be_api(size) == may_be


def test_how_bytes_are_counted_and_text_is_shortened_in_faults():
    assert [decode.count_bytes(count) for count in (0, 1, 2, 1234)] == ["0 bytes", "1 byte", "2 bytes", "1,234 bytes"]
    for size, shown in ((40, repr("z" * 40)), (41, repr("z" * 40) + "...")):
        with pytest.raises(Malformed, match=f"not hexadecimal: 'z' in {re.escape(shown)};"):
            decode.bytes_of(b"z" * size, must_be_hex=True)


def test_captures_and_compressed_files_are_known_by_their_first_bytes():
    versions = b"\x02\0\x04\0", b"\0\x02\0\x04"
    for magic in ("a1b2c3d4", "d4c3b2a1", "a1b23c4d", "4d3cb2a1"):
        for version in versions:
            assert decode.is_capture(bytes.fromhex(magic) + version + b"more")
        assert not decode.is_capture(bytes.fromhex(magic) + b"\0\x02\0\x05") and not decode.is_capture(FRAME)
    assert (
        decode.is_capture(b"\n\r\r\n") and not decode.is_capture(b"\n\r\r") and not decode.is_capture(versions[0] * 2)
    )
    for head in ("1f8b08", "28b52ffd", "04224d18"):
        assert decode.is_compressed(bytes.fromhex(head) + b"more") and decode.is_compressed(bytes.fromhex(head))
        assert not decode.is_compressed(bytes.fromhex(head)[:-1] + b"m") and not decode.is_compressed(b"")
    assert decode.is_text(b"\t\n\r ~") and not any(map(decode.is_text, (b"", b"\x1f", b"\x7f", b"a\0", b"\xc3\xa9")))
