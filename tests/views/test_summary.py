"""What is said of captures: names are printed safely, and the verdict claims nothing about bytes that were not read."""

import json
import re
import shlex
import shutil
import struct

import pytest
from click.testing import CliRunner

from kproxy.capture.dissection.packets import ACK, FIN, RST, SYN
from kproxy.capture.quality import Quality
from kproxy.cli import cli
from kproxy.convert.job import Settings, Summary, captures_of
from kproxy.convert.processes import convert
from kproxy.errors import CaptureError, KproxyError
from kproxy.protocol.apis import HEARTBEAT
from kproxy.views import answers, units
from kproxy.views.summary import NOTHING_READ, lacking, show, verdict
from tests import captures
from tests.capture import packet
from tests.capture.connections.test_flows import Wire
from tests.wire.playbook import request, response


def quality(*kinds):
    result = Quality()
    for kind in kinds:
        result.note(kind, 1)
    return result


def converted(tmp_path, *arguments):
    result = CliRunner().invoke(cli, ["convert", *map(str, arguments), "-o", str(tmp_path / "out")])
    lines = result.stdout.splitlines()
    assert all(line == line.rstrip() for line in lines)  # no blanks behind a line
    return result, lines


def test_a_conversion_says_what_is_in_it_and_what_to_type_next(tmp_path):
    """Time span, brokers, clients, APIs, errors, the slowest; and the commands run as they stand there."""
    capture = tmp_path / "it's mine.pcap"
    shutil.copy(captures.capture("k41_quota"), capture)
    result, lines = converted(tmp_path, "--cluster", "blue", capture)
    assert result.exit_code == 0
    text = result.stdout
    span = "2026-11-21 09:48:53.185 to 2026-11-21 09:49:31.650 UTC, 38.5 s: 373 exchanges, 3.53 MB, 13 connections"
    assert f"{span}, 1 source" in lines
    assert "brokers   broker 1 at 127.0.0.1:9092" in lines
    assert "clients   thr-req (apache-kafka-java 4.1.0), thr (apache-kafka-java 4.1.0)" in lines
    assert "topics    qt (1.86 MB written, 1.60 MB read)" in lines
    assert re.search(r"^  Produce +319 +[\d.]+ ms +[\d.]+ s +5\.57 s$", text, re.M)
    assert "errors    CreateTopics: THROTTLING_QUOTA_EXCEEDED ×2; " in text
    assert "throttled thr-req CreateTopics ×2, 9.61 min in all, thr Produce ×" in text
    slowest = "slowest   5.57 s, Produce of thr (the longest of 13): muted for 5.56 s after earlier answers"
    assert f"{slowest} that were throttled" in text
    *questions, show_it = lines[lines.index("Next:") + 1 :]
    assert [line.split()[2] for line in questions] == ["overview", "slow", "errors", "throttle"]
    for line in questions:
        assert CliRunner().invoke(cli, shlex.split(line)[1:]).exit_code == 0
    again = CliRunner().invoke(cli, shlex.split(show_it)[1:])
    assert again.exit_code == 0 and again.stdout.startswith("Produce, request ")
    assert "Why: muted for 5.56 s" in again.stdout


HEARTBEAT_0, OF_HEARTBEAT_0 = request(HEARTBEAT, 0, 1)[4:], response(HEARTBEAT, 0, 1)[4:]
NEWER_FETCH = bytes.fromhex("0001001e 00000007 0003") + b"app\0" + bytes(40)  # version 30 has no layout
OF_NEWER_FETCH = bytes.fromhex("00000007 00") + bytes(40)
AUTH = bytes.fromhex("fffffffc 00000064 00000000 00000006") + b"digest" + bytes.fromhex("00000003") + b"a:b"


def _pieces(name, first, count):
    """The packets of a test's capture from the first one on, with their times."""
    content = captures.capture(name).read_bytes()
    pos, found = 24, []
    while pos < len(content) and len(found) < first + count:
        seconds, micros, size, _ = struct.unpack_from("<IIII", content, pos)
        found.append((seconds * 10**9 + micros * 1000, content[pos + 16 : pos + 16 + size]))
        pos += 16 + size
    return found[first:]


def _spoken(*payloads):
    """The packets of a connection on which client and broker send the payloads in turn, each with its size."""
    wire = Wire().shake()
    for number, payload in enumerate(payloads):
        wire.send(number % 2, len(payload).to_bytes(4) + payload)
    return [(number * 10**9, data) for number, data in enumerate(wire.packets)]


@pytest.mark.parametrize(
    ("packets", "options", "asked"),
    [
        (_spoken(HEARTBEAT_0, OF_HEARTBEAT_0), (), ["overview", "slow", "latency"]),
        (
            _spoken(HEARTBEAT_0, OF_HEARTBEAT_0, NEWER_FETCH, OF_NEWER_FETCH),
            (),
            ["overview", "slow", "latency", "fetching"],
        ),
        (_spoken(AUTH), ("--zookeeper-port", "9092"), ["overview"]),
        (("k0102_zookeeper", 1009, 20), (), ["overview", "registry"]),
    ],
)
def test_every_next_question_has_an_answer(tmp_path, packets, options, asked):
    """Bodies of an unknown version have no rows, nor does an authentication change ZooKeeper's tree, nor has a group
    of ZooKeeper a rebalance because its consumers are named. Counts of one are singular in all of it."""
    path = tmp_path / "wire.pcap"
    path.write_bytes(packet.pcap(packets if isinstance(packets, list) else _pieces(*packets)))
    result, lines = converted(tmp_path, *options, path)
    assert result.exit_code == 0, result.output
    questions = [shlex.split(line)[1:] for line in lines[lines.index("Next:") + 1 :]]
    assert [words[1] for words in questions if words[0] == "analyze"] == asked
    for words in questions:
        answer = CliRunner().invoke(cli, words)
        assert answer.exit_code == 0 and "No rows" not in answer.output, answer.output
        plural = re.search(r"(?<![\d,.])1 (answer|connection|exchange|packet|record|request|row)s\b", answer.output)
        assert plural is None, answer.output


def test_named_ports_without_kafka_are_given_as_the_reason_for_an_empty_result(tmp_path):
    result, lines = converted(tmp_path, "--port", 9999, captures.capture("k41_quota"))
    assert result.exit_code == 1 and any(
        line.startswith("No Kafka in it at these ports. Without --port") for line in lines
    )
    assert not [line for line in lines if line.startswith(f"{0:>12} rows ")]  # empty tables would hide it


@pytest.mark.ring2
def test_the_end_of_a_conversion_and_the_overview_show_the_same_text(tmp_path):
    """Figures of its captures alone, though the folder holds others; the same rules for errors and for brokers."""
    converted(tmp_path, captures.capture("k41_librdkafka"))
    result, lines = converted(tmp_path, captures.capture("k41_java_cluster"), "--append")
    other = tmp_path / "other"
    other.mkdir()
    alone = converted(other, captures.capture("k41_java_cluster"))[1]
    start = next(number for number, line in enumerate(lines) if "UTC" in line)
    assert lines[start : lines.index("", start)] == alone[start : alone.index("", start)]
    overview = json.loads(
        CliRunner().invoke(cli, ["analyze", "overview", str(other / "out"), "--format", "json"]).stdout
    )
    for row in overview["apis"][:4]:
        errors = f"{row['errors']:,} +" if row["errors"] else ""
        assert re.search(
            rf"^  {row['api']} +{row['exchanges']:,} +{errors}{re.escape(units.duration(row['p50_ns']))} ",
            result.stdout,
            re.M,
        ), row
    assert re.search(rf"^brokers   .*{re.escape(overview['brokers'][0]['broker'])}", result.stdout, re.M)
    for row in overview["errors"][:4]:
        assert f"{row['api']}: {answers.text('error', row['error'])} ×{row['exchanges']:,}" in result.stdout


def test_what_is_no_capture_has_no_rows_to_tell_of_and_zookeeper_alone_has_questions(tmp_path):
    (tmp_path / "notes.pcap").write_text("hello")
    result, lines = converted(tmp_path, tmp_path / "notes.pcap")
    assert result.exit_code == 1 and not lines
    _, lines = converted(tmp_path, captures.capture("k0102_zookeeper"))
    assert f"  kproxy analyze overview {tmp_path}/out" in lines


def test_what_has_no_times_is_of_no_year_and_has_no_latency_to_ask_for(tmp_path):
    packets = Wire().shake().ask(1, 2).packets
    for name, step_ns in (("timeless", 0), ("timed", 1_000_000)):
        (tmp_path / f"{name}.pcap").write_bytes(
            packet.pcap([(number * step_ns, data) for number, data in enumerate(packets)])
        )
        _, lines = converted(tmp_path / name, tmp_path / f"{name}.pcap")
        is_timed = name == "timed"
        assert any(line.startswith("At times that are not known: 2 exchanges") for line in lines) != is_timed
        assert any(line.startswith("1970-01-01 00:00:00.003 to ") for line in lines) == is_timed
        assert any("analyze latency" in line for line in lines) == is_timed


def test_an_overview_of_captures_with_and_without_times_begins_when_the_former_do(tmp_path):
    packets = Wire().shake().ask(1, 2).packets
    paths = [tmp_path / f"{step}.pcap" for step in (0, 1)]
    for step, path in enumerate(paths):
        times = [step * (number * 10**6 + 1_700_000_000 * 10**9) for number in range(len(packets))]
        path.write_bytes(packet.pcap(list(zip(times, packets, strict=True))))
    CliRunner().invoke(cli, ["convert", *map(str, paths), "--out", str(tmp_path / "out"), "--processes", "1", "-q"])
    shown = CliRunner().invoke(cli, ["analyze", "overview", str(tmp_path / "out")]).stdout
    assert re.search(
        r"^2023-11-14 22:13:20.003 to 2023-11-14 22:13:20.0\d\d UTC, \S+ ms: 4 exchanges", shown, re.MULTILINE
    )


def test_groups_are_mentioned_if_anything_happened(tmp_path):
    _, lines = converted(tmp_path, captures.capture("k41_librdkafka"))
    (line,) = (line for line in lines if line.startswith("groups "))
    assert re.match(r"groups    rdk-grp: \d+ rebalances, worst cause member_joined", line)
    _, lines = converted(tmp_path, captures.capture("k41_quota"), "--detail", "headers")
    assert not [line for line in lines if line.startswith("groups ")]


def test_other_captures_in_the_folder_are_named_and_quiet_leaves_out_the_overview(tmp_path):
    _, first = converted(tmp_path, captures.capture("k41_BASE"))
    assert not [line for line in first if "also holds" in line]
    with pytest.raises(KproxyError, match=r"out has the tables of k41_BASE.pcap, .* add to them with --append"):
        convert([captures.capture("k41_quota")], tmp_path / "out")
    _, second = converted(tmp_path, captures.capture("k41_quota"), "--append")
    assert f"{tmp_path / 'out'} also holds k41_BASE.pcap" in second
    _, quiet = converted(tmp_path, captures.capture("k41_quota"), "--quiet")
    assert "Next:" not in quiet and not [line for line in quiet if line.startswith("brokers")]


@pytest.mark.parametrize(
    ("name", "arguments", "status", "complaint"),
    [
        ("k41_BASE", (), 0, ""),
        ("k41_quota", ("--strict",), 0, ""),
        ("k41_BASE", ("--port", "1"), 1, "no Kafka was found"),
        ("k41_gaps", (), 0, ""),
        ("k41_gaps", ("--strict",), 1, "k41_gaps.pcap is not complete (--strict)"),
    ],
)
def test_the_exit_status_shows_whether_the_capture_had_kafka(tmp_path, name, arguments, status, complaint):
    result, lines = converted(tmp_path, captures.capture(name), *arguments)
    assert (result.exit_code, complaint in result.stderr, bool(result.stderr)) == (status, True, bool(complaint))
    assert ("Next:" in lines) == ("no Kafka" not in complaint)


def test_a_folder_stands_for_its_captures(tmp_path):
    for name in ("b.pcap", "a.PCAPNG.gz", "c.pcap7", "notes.txt", "d.pcap.part"):
        shutil.copy(captures.capture("k41_BASE"), tmp_path / name)
    (tmp_path / "e.pcap").mkdir()
    result, lines = converted(tmp_path, tmp_path)
    assert result.exit_code == 0
    there = {path.name for path in tmp_path.iterdir()}
    assert [line for line in lines if line in there] == ["a.PCAPNG.gz", "b.pcap", "c.pcap7"]
    with pytest.raises(KproxyError, match="no captures in this folder"):
        captures_of([tmp_path / "e.pcap"], Settings())


def test_captures_in_folders_by_day_are_read_by_the_pattern_that_is_named(tmp_path):
    for day in (1, 2):
        folder = tmp_path / "captures of june" / f"2026-06-0{day}"
        folder.mkdir(parents=True)
        shutil.copy(captures.capture("k41_BASE"), folder / f"{day}.pcap0")
    with pytest.raises(KproxyError, match="or those of the folders below it") as fault:
        captures_of([tmp_path / "captures of june"], Settings())
    (pattern,) = shlex.split(str(fault.value).rpartition(" quotes: ")[2])
    assert [job.source for job in captures_of([pattern], Settings())] == ["1.pcap0", "2.pcap0"]


def test_names_are_no_markup_and_cannot_move_the_cursor(tmp_path, capsys):
    name = "a[/b] :boom: \x1b[31m\udcff.pcap"
    show(Summary(tmp_path / "[red]" / "[/x]", {"exchanges": 3}, {name: quality("packets")}, [CaptureError(name, "no")]))
    output = capsys.readouterr()
    shown = "a[/b] :boom: \\x1b[31m\\udcff.pcap"
    assert output.out.startswith(shown)
    assert "[red]/[/x]/exchanges" in output.out
    failed, nothing = output.err.splitlines()
    assert failed == f"kproxy: {shown}: no"
    assert nothing == "kproxy: no Kafka was found: the tables have no exchanges"


def _of_no_kafka():
    """Captures without Kafka, by what is in them."""
    hello = b"\x16\x03\x01\0\x05hello"
    yield "refused", Wire().send(0, flags=SYN).send(1, flags=RST | ACK)
    yield "no byte", Wire().shake().send(0, flags=FIN | ACK).send(1, flags=FIN | ACK).send(0)
    yield "TLS unanswered", Wire().shake().send(0, hello).send(1, flags=FIN | ACK).send(0, flags=FIN | ACK).send(1)
    yield "TLS", Wire().shake().send(0, hello).send(1, hello).send(0, flags=FIN | ACK).send(1, flags=FIN | ACK)
    yield "HTTP", Wire().shake().send(0, b"GET / HTTP/1.1\r\n\r\n").send(1, b"HTTP/1.1 200 OK\r\n\r\n")
    other = Wire().shake().send(0, b"GET / HTTP/1.1\r\n\r\n").send(1, b"HTTP/1.1 200 OK\r\n\r\n")
    other.packets += Wire(client=(packet.CLIENT[0], 50001)).send(0, flags=SYN).send(1, flags=RST | ACK).packets
    yield "refused beside HTTP", other
    yield "another protocol", Wire().shake().send(0, bytes(range(200, 250)) * 3).send(1, bytes(range(200, 250)) * 3)
    unknown = bytes.fromhex("00000014 7918004d00000001 0001ff") + bytes(9)  # API 31000, version 77
    yield "an unknown API", Wire().shake().send(0, unknown).send(1, bytes.fromhex("0000000600000001") + bytes(2))
    for name, begin in (("SOCKS", b"\5\1\0"), ("PostgreSQL", b"\0\0\0\x29\0\3\0\0user\0me\0")):
        yield name, Wire().shake().send(0, begin).send(1, b"\5\0").send(0, b"\5\1\0\1\x0a\0\0\2" + bytes(40))
    yield "too few bytes", Wire().send(0, bytes(range(200, 210)))
    headers = Wire().shake().send(0, bytes(100)).send(1, bytes(100))
    headers.packets = [each[:54] for each in headers.packets]
    yield "headers alone", headers


@pytest.mark.parametrize(("name", "wire"), [*_of_no_kafka()], ids=lambda given: given if isinstance(given, str) else "")
def test_no_option_is_advised_that_would_not_change_the_result(tmp_path, name, wire):
    """Following an advice changes the result; that keys decrypt TLS is tried where there are keys (test_decrypt)."""
    quality = wire.seen(tmp_path).quality
    advice = verdict(quality)
    assert ("--port" in advice) == (name in ("an unknown API", "too few bytes"))
    assert ("--key-log" in advice) == (name == "TLS") and "--zookeeper-port" not in advice
    assert ("speak HTTP" in advice) == (name == "HTTP") and ("carried a byte" in advice) == (name == "no byte")
    assert ("was refused" in advice) == (name in ("refused", "refused beside HTTP"))
    if "--port" in advice:
        followed = wire.seen(tmp_path, ports=(9092,))
        assert verdict(followed.quality) != advice and followed.quality.count("kafka") == 1
        assert len(followed.exchanges) == (name == "an unknown API")


@pytest.mark.parametrize("kept", (16, 34, 50, 54, 58, 67))
def test_a_capture_cut_before_its_requests_can_be_recognised_is_to_be_made_again(tmp_path, kept):
    """Whatever bytes are left of each packet, no port of Kafka makes requests of them."""
    wire = Wire().shake()
    for number in range(9):
        wire.send(0, request(HEARTBEAT, 4, number)).send(1, response(HEARTBEAT, 4, number))
    path = tmp_path / "short.pcap"
    cut = [(number * 10**6, data[:kept], len(data)) for number, data in enumerate(wire.packets)]
    path.write_bytes(packet.pcap(cut, snap=kept))
    result, lines = converted(tmp_path, path)
    assert result.exit_code == 1 and any("Capture again with -s 0" in line for line in lines)
    assert not any("--port" in line or "right interface" in line or "makes no sense" in line for line in lines)


def test_a_client_id_as_long_as_a_broker_takes_floods_no_screen(tmp_path):
    wire = Wire().shake()
    name = b"begins-" + b"x" * 32_000 + b"-ends"
    for number in range(3):
        ask = request(HEARTBEAT, 0, number)[4:]
        ask = ask[:8] + len(name).to_bytes(2) + name + ask[10 + int.from_bytes(ask[8:10]) :]
        wire.send(0, len(ask).to_bytes(4) + ask).send(1, response(HEARTBEAT, 0, number))
    path = tmp_path / "long.pcap"
    path.write_bytes(packet.pcap([(number * 10**9, data) for number, data in enumerate(wire.packets)]))
    result, lines = converted(tmp_path, path)
    assert result.exit_code == 0 and any("begins-xxx" in line and "xxx-ends" in line for line in lines)
    assert max(map(len, lines)) < 500


@pytest.mark.parametrize(("tries", "port", "error"), [(3, 9092, "unanswered"), (0, 9092, ""), (3, 9099, "")])
def test_a_client_whose_host_tries_the_broker_again_in_vain_missed_the_answer(tmp_path, tries, port, error):
    """As behind a broker that was killed: no request of the client follows, so only its connects show that it waits."""
    wire = Wire().shake().send(0, request(HEARTBEAT, 4, 1)).send(1, flags=RST | ACK)
    for number in range(tries):
        again = Wire(client=(packet.CLIENT[0], 51_000 + number))
        again.ends = (again.ends[0], (packet.BROKER[0], port))
        wire.packets += again.send(0, flags=SYN).send(1, flags=RST | ACK).packets
    path = tmp_path / "killed.pcap"
    path.write_bytes(packet.pcap([(number * 10**6, data) for number, data in enumerate(wire.packets)]))
    _, lines = converted(tmp_path, path)
    (errors,) = (line for line in lines if line.startswith("errors"))
    assert errors == f"errors    Heartbeat: {error or 'no answer, the broker closed the connection'} ×1"


@pytest.mark.parametrize("opens", (True, False))
def test_another_protocol_on_a_named_kafka_port_is_reported(tmp_path, opens):
    """After following the advice to name the port, the user gets its result, and not the same advice again."""
    wire = Wire().shake() if opens else Wire()
    for _ in range(5):
        wire.send(0, b"PING\r\n" * 9).send(1, b"+PONG\r\n" * 9)
    path = tmp_path / "redis.pcap"
    path.write_bytes(packet.pcap([(number * 10**6, data) for number, data in enumerate(wire.packets)]))
    result, lines = converted(tmp_path, path, "--port", "9092")
    assert result.exit_code == 1 and result.stderr == f"kproxy: {NOTHING_READ}\n"
    assert "Next:" not in lines and not any("name the brokers' ports" in line for line in lines)
    shown = CliRunner().invoke(cli, ["analyze", "overview", str(tmp_path / "out")]).stdout
    assert shown.startswith(f"No exchanges. N{NOTHING_READ[1:]}. Convert without --port: ")


def test_an_answer_that_a_capture_lacks_is_not_called_lost():
    assert answers.text("error", "lost") == "answer not captured"


def test_connects_that_failed_lead_to_their_finding(tmp_path):
    path = tmp_path / "refused.pcap"
    wire = Wire()
    wire.send(0, flags=SYN).send(1, flags=RST | ACK)
    path.write_bytes(packet.pcap([(number * 10**6, data) for number, data in enumerate(wire.packets)]))
    _, lines = converted(tmp_path, path)
    asked = shlex.split(lines[lines.index("Next:") + 1])[1:]
    assert CliRunner().invoke(cli, asked).stdout.count("Connections that could not be made") == 2


def test_counts_of_one_are_singular(capsys, tmp_path):
    kinds = ("packets", "retransmissions", "gap", "open", "connect_refused", "strays", "not_kept")
    show(Summary(tmp_path, quality={"a.pcap": quality(*kinds)}))
    lines = capsys.readouterr().out.splitlines()[1 : 1 + len(kinds)]
    assert [line.split("  ")[-1].partition(":")[0] for line in lines] == [
        "packet record read",
        "retransmission",
        "gap",
        "connection still open when the capture ended",
        "connection attempt that was refused",
        "segment whose sequence number belongs to no window of its connection",
        "exchange missing from the tables of groups, leaders and changes",
    ]


@pytest.mark.parametrize(
    "kinds, words",
    [
        ((), "no packet"),
        (("cut_file",), "no packet"),
        (("packets",), "No Kafka in it"),
        (("packets", "not_tcp"), "No Kafka in it, and no TCP"),
        (("packets", "tls"), "with --key-log FILE"),
        (
            ("packets", "connect_closed_at_once"),
            "No Kafka in it: 1 connection attempt that the server closed before a byte",
        ),
        (("packets", "connect_undelivered", "undelivered"), "No Kafka in it: 1 connection attempt that ICMP answered"),
        (("packets", "kafka", "retransmissions", "duplicate_packets", "open", "not_tcp"), "Complete"),
        (("packets", "kafka", "gap", "tls"), "Not complete: bytes are missing; some connections are encrypted"),
        (("packets", "kafka", "unknown_link"), "Not complete"),
        (("packets", "kafka", "malformed"), "Not complete"),
        (("packets", "kafka", "idle"), "Not complete"),
        (("packets", "kafka", "midstream"), "Not complete: connections were open before the capture began"),
        (("packets", "kafka", "stream 0 a", "stream 0 b"), "captured twice are counted twice"),
        (("packets", "kafka", "resync"), "Not complete: bytes were skipped"),
        (("packets", "kafka", "strays"), "Not complete: segments fit no window"),
        (("packets", "kafka", "fault"), "Not complete: connections break the protocol"),
    ],
)
def test_how_far_tables_can_be_trusted(kinds, words):
    assert words in verdict(quality(*kinds))


def test_answers_lack_nothing_because_connections_were_open_before_the_capture():
    open_before = {"packets": 9, "kafka": 2, "midstream": 2, "resync": 1}
    assert lacking(open_before) == []
    assert lacking(open_before | {"gap": 1}) == ["bytes are missing"]


def test_requests_to_a_port_with_tls_are_not_called_answered(tmp_path):
    converted(tmp_path, captures.capture("k41_tls_nokeys_kcat"))
    shown = CliRunner().invoke(cli, ["analyze", "overview", str(tmp_path / "out")]).stdout
    assert "failed       1 of 1 request (100.0%): 1 unanswered, 0 refused" in shown
