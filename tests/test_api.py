"""The public API: its names, its types, that it is loaded only where it is used, and that its examples run."""

import asyncio
import inspect
import io
import re
import subprocess
import sys
import textwrap
from typing import get_type_hints

import pyarrow.parquet as pq
import pytest

import kproxy
from kproxy.convert.processes import convert
from kproxy.demo.cluster import Cluster
from kproxy.errors import install_command
from kproxy.protocol.records import write_batch
from tests import captures
from tests.project import ROOT

NAMES = """CaptureError ConfigError KproxyError Malformed ProtocolError Proxy Unsupported UpstreamError
    decode_request decode_response encode_request encode_response exchanges read_batches"""


def test_the_names_are_pinned_documented_and_typed():
    assert sorted(kproxy.__all__) == sorted(NAMES.split())
    assert set(kproxy.__all__) <= set(dir(kproxy))
    for name in kproxy.__all__:
        value = getattr(kproxy, name)
        assert len(inspect.getdoc(value) or "") > 40 or issubclass(value, Exception), name
        if inspect.isfunction(value):
            hints = get_type_hints(value)
            assert set(inspect.signature(value).parameters) | {"return"} == set(hints), name
    with pytest.raises(AttributeError, match="no attribute 'decode'"):
        kproxy.decode  # noqa: B018


def test_the_import_is_light():
    code = "import sys, kproxy; print(*[name for name in sys.modules if name.startswith('kproxy')])"
    code += "; kproxy.decode_request; print(*{'numpy', 'uvloop', 'pydantic', 'asyncio', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["kproxy", ""]


def test_what_is_not_installed_is_named_with_its_mend():
    code = "import sys; sys.modules['pyarrow'] = None; import kproxy; kproxy.exchanges"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    fix = install_command("offline")
    assert f"kproxy.exchanges needs pyarrow, which is not installed: {fix}" in done.stderr


def test_help_works_where_an_extra_is_missing():
    code = (
        "import sys; sys.modules['pyarrow'] = None; import pydoc, kproxy; print(pydoc.plain(pydoc.render_doc(kproxy)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "decode_request(frame" in done.stdout and "class Proxy" in done.stdout, done.stderr
    assert "exchanges    " in done.stdout, "the head of the module names what needs an extra"


@pytest.mark.ring2
def test_types_hold_for_a_program_that_uses_them(tmp_path):
    """As a user's strict mypy sees them: no name is Any, and no import is untyped."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import kproxy

            async def main() -> None:
                async with kproxy.Proxy(bootstrap=["a:9092", "b:9092"]) as proxy:
                    reveal_type(proxy.address.port)
                reveal_type(kproxy.decode_request(b"")[0])
                reveal_type(next(kproxy.exchanges("x.pcap")))
                reveal_type(kproxy.read_batches(b"")[0][0].crc_valid)
                try:
                    kproxy.encode_request({}, {})
                except kproxy.ConfigError as fault:
                    reveal_type(fault.faults)
        """)
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    shown = re.findall(r'Revealed type is "(.*)"', done.stdout.replace("builtins.", "").replace("typing.", ""))
    expected = ["int", "dict[str, Any]", "dict[str, Any]", "bool", "tuple[tuple[str, str], ...]"]
    assert shown == expected, done.stdout + done.stderr
    assert "error" not in done.stdout, done.stdout
    program.write_text("import kproxy\n\nkproxy.decode_requests(b'')\n")  # mistyped
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert "has no attribute" in done.stdout, done.stdout


def test_frames_there_and_back():
    header = {"requestApiKey": 3, "requestApiVersion": 12, "correlationId": 7, "clientId": "mine"}
    frame = kproxy.encode_request(header, {"topics": [{"name": "orders"}], "allowAutoTopicCreation": False})
    read, body = kproxy.decode_request(frame)
    assert read | header == read
    assert body["topics"][0]["name"] == "orders"
    answer = kproxy.encode_response(3, 12, {"correlationId": 7}, {"clusterId": "c", "controllerId": 1})
    assert kproxy.decode_response(answer, 3, 12)[1]["clusterId"] == "c"
    with pytest.raises(kproxy.Malformed):
        kproxy.decode_request(frame[:-1])
    with pytest.raises(kproxy.Unsupported):
        kproxy.decode_response(answer, 3, 999)


def test_exchanges_are_the_rows_that_convert_writes(tmp_path):
    capture = captures.capture("k41_BASE")
    convert([capture], tmp_path)
    written = pq.read_table(tmp_path / "exchanges").to_pylist()
    assert list(kproxy.exchanges(capture)) == written
    assert len(written) > 10
    with pytest.raises(kproxy.CaptureError, match="pyproject"):
        next(kproxy.exchanges(ROOT / "pyproject.toml"))


@pytest.mark.parametrize(
    "wrong",
    (
        *({"key_log": "nowhere.keys"}, {"ports": [99999]}, {"cluster": ""}),
        *({"ports": "9092"}, {"ports": ["9092"]}, {"ports": 9092}, {"ports": None}),
    ),
)
def test_arguments_of_exchanges_that_cannot_be_are_refused(wrong):
    with pytest.raises(kproxy.KproxyError):
        next(kproxy.exchanges(captures.capture("k41_midstream"), **wrong))


@pytest.mark.parametrize("wrong", (None, 5, "", b"a.pcap", ["a.pcap"], io.BytesIO(b"")))
def test_what_is_no_path_is_no_capture(wrong):
    with pytest.raises(kproxy.KproxyError, match="is no path of a capture"):
        next(kproxy.exchanges(wrong))


def test_a_folder_of_captures_is_read_one_by_one(tmp_path):
    for name in ("a.pcap", "b.pcap"):
        (tmp_path / name).write_bytes(captures.capture("k41_midstream").read_bytes())
    with pytest.raises(kproxy.KproxyError, match="folder of 2 captures"):
        next(kproxy.exchanges(tmp_path))


def test_a_proxy_inside_a_program():
    async def play() -> None:
        cluster = Cluster(topics={"orders": 3})
        await cluster.start()
        bootstrap = ",".join(f"{host}:{port}" for host, port in cluster.bootstrap)
        try:
            async with kproxy.Proxy(bootstrap=bootstrap, admin="127.0.0.1:0") as proxy:
                reader, writer = await asyncio.open_connection(*proxy.address)
                header = {"requestApiKey": 3, "requestApiVersion": 12, "correlationId": 7, "clientId": "mine"}
                frame = kproxy.encode_request(header, {"topics": None})
                writer.write(len(frame).to_bytes(4, "big") + frame)
                size = int.from_bytes(await reader.readexactly(4), "big")
                _, answer = kproxy.decode_response(await reader.readexactly(size), 3, 12)
                ports = {broker["port"] for broker in answer["brokers"]}
                assert ports == {proxy.address.port + 1 + broker["nodeId"] for broker in answer["brokers"]}
                assert proxy.admin_address is not None
                address = proxy.address
                writer.close()
            with pytest.raises(OSError):
                await asyncio.open_connection(*address)
            with pytest.raises(kproxy.KproxyError, match="does not run"):
                proxy.address  # noqa: B018
            async with proxy:  # again
                assert proxy.address == address
                with pytest.raises(kproxy.KproxyError, match="runs already"):
                    await proxy.__aenter__()
                _, writer = await asyncio.open_connection(*address)
                writer.close()
        finally:
            await cluster.stop()

    asyncio.run(play())


def test_a_proxy_inside_a_program_has_all_settings_of_a_file(tmp_path):
    """Tables too, as dicts: one that a listener takes part in, and one of the process."""

    async def play() -> None:
        cluster = Cluster(topics={"orders": 3})
        await cluster.start()
        bootstrap = [f"{host}:{port}" for host, port in cluster.bootstrap]
        settings = {
            "name": "mine",
            "limits": {"max_connections_per_address": 1},
            "policy": [{"action": "deny", "topic": "secret-*"}],
            "connect_timeout_s": 3,
        }
        try:
            async with kproxy.Proxy(bootstrap=bootstrap, **settings) as proxy:
                _, first = await asyncio.open_connection(*proxy.address)
                reader, second = await asyncio.open_connection(*proxy.address)
                assert await asyncio.wait_for(reader.read(), 10) == b"", "the limit keeps the second client out"
                for writer in (first, second):
                    writer.close()
        finally:
            await cluster.stop()

    asyncio.run(play())


def test_a_proxy_that_cannot_be_says_why(tmp_path):
    with pytest.raises(kproxy.ConfigError, match="colour"):
        kproxy.Proxy(bootstrap="127.0.0.1:1", colour="blue")
    for no_time in ("30", None, 0, float("nan")):
        with pytest.raises(kproxy.ConfigError, match=r"^ready_timeout_s: .* is no number of seconds$"):
            kproxy.Proxy(bootstrap="127.0.0.1:1", ready_timeout_s=no_time)
    with pytest.raises(kproxy.ConfigError, match=r"^drain_timeout: no such setting; did you mean drain_timeout_s\?$"):
        kproxy.Proxy(bootstrap="127.0.0.1:1", drain_timeout=3)
    with pytest.raises(kproxy.ConfigError, match=r"^bootstrap\[0\]: 'nowhere' is not HOST:PORT"):
        kproxy.Proxy(bootstrap="nowhere")
    with pytest.raises(kproxy.ConfigError, match=r"^tls\.certificate: is missing"):
        kproxy.Proxy(bootstrap="127.0.0.1:1", tls={})
    (tmp_path / "file").touch()

    async def unwritable() -> None:
        async with kproxy.Proxy(bootstrap="127.0.0.1:1", record=tmp_path / "file"):
            pass

    with pytest.raises(kproxy.ConfigError, match=r"record: .*file: cannot be written to"):
        asyncio.run(unwritable())

    async def unreachable() -> None:
        async with kproxy.Proxy(bootstrap="127.0.0.1:1", ready_timeout_s=0.2):
            pass

    with pytest.raises(kproxy.UpstreamError, match=r"not ready after 0\.2 s"):
        asyncio.run(unreachable())


def test_the_examples_of_the_readme_run(tmp_path):
    """As it stands there, with a capture and a cluster of ours."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    examples = [block for block in blocks if "import kproxy\n" in block]
    assert len(examples) == 3
    (tmp_path / "incident.pcap").write_bytes(captures.capture("k41_BASE").read_bytes())

    async def play() -> str:
        cluster = Cluster(topics={"orders": 3})
        await cluster.start()
        host, port = cluster.bootstrap[0]
        try:
            shown = b""
            for example in examples:  # each on its own
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", example.replace("kafka-1:9092", f"{host}:{port}")),
                    cwd=tmp_path,
                    stdout=asyncio.subprocess.PIPE,
                )
                shown += (await process.communicate())[0]
                assert process.returncode == 0
        finally:
            await cluster.stop()
        return shown.decode()

    lines = asyncio.run(play()).splitlines()
    assert lines[0] == "7 foo"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", lines[-1])
    assert any(re.fullmatch(r"Metadata [\d.]+ ms", line) for line in lines)


def test_record_batches():
    from kproxy.protocol.records import Record

    batches, trailing = kproxy.read_batches(write_batch([Record(0, 1, b"key", b"value")]) + b"rest")
    assert [record.value for batch in batches for record in batch.records()] == [b"value"]
    assert (trailing, batches[0].crc_valid) == (4, True)
