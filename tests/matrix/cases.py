"""One case after another: a client's driver runs through kproxy, and what came back is compared with what was sent.

While a driver runs, its processes' sockets are looked at: none may lead to a broker. After all cases of a release, each
connection that a broker accepted must be one that kproxy made. What did not work through kproxy is tried without it:
what fails there too cannot exist if the client says that it lacks a version or a mechanism, or if it fails twice in the
same place. One that ran out of time says nothing: the machine may have been busy. Such a case stays open.
"""

import json
import os
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tests.broker.cluster import wait_for
from tests.broker.security import OAUTHBEARER
from tests.matrix.brokers import Brokers, Release
from tests.matrix.clients import Client
from tests.matrix.records import fault, records
from tests.matrix.ways import Proxy, Way

TIMEOUT_S = 180  # the driver of kcat starts it fifty times
_REASON_CHARACTERS = 240
_DRIVER_FAULTS = ("ModuleNotFoundError", "ImportError", "TypeError", "NameError", "AttributeError", "KeyError")
_WORKS, _FAILS, _CANNOT, OPEN = "works", "fails", "cannot", "open"
# What clients say when they ran out of time, and when one of the two sides lacks what the other asks for.
_TIMED_OUT = re.compile(
    r"nothing happened for|records after|time ?d? ?out|deadline exceeded|not (acknowledged|present in)", re.I
)
_LACKS = re.compile(
    r"unsupported|(not|don't|doesn't) support|version|mechanism|not enabled|invalid[_ ](token|credential)", re.I
)


@dataclass(frozen=True)
class Case:
    """A client, a release, a way."""

    client: Client
    release: Release
    way: Way


@dataclass(frozen=True)
class Outcome:
    """What came of a case. state: "works", "fails", "cannot", where the client itself cannot, or "open": try again."""

    case: Case
    state: str
    reason: str = ""
    records: int = 0
    seconds: float = 0.0


class Results:
    """A file with a line for each outcome, so that a run that was broken off goes on where it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[str, str, str], dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                found = json.loads(line)
                self._known[found["client"], found["broker"], found["way"]] = found

    def of(self, case: Case) -> Outcome | None:
        """What is known of a case."""
        found = self._known.get((case.client.name, case.release.name, case.way.name))
        return found and Outcome(case, found["state"], found["reason"], found["records"], found["seconds"])

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome, unless it is still open."""
        if outcome.state == OPEN:
            return
        case = outcome.case
        line = {"client": case.client.name, "broker": case.release.name, "way": case.way.name}
        line |= {"state": outcome.state, "reason": outcome.reason, "records": outcome.records}  # type: ignore[dict-item]
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line | {"seconds": round(outcome.seconds, 1)}) + "\n")


class Leak(AssertionError):
    """A client reached a broker past kproxy."""


def job(case: Case, brokers: Brokers, bootstrap: str, folder: Path, *, proxied: bool) -> dict[str, Any]:
    """What a driver is to do: see clients/README.md."""
    client, release = case.client, case.release
    codecs = [codec for codec in client.codecs if codec in release.codecs]
    if client.mode != "groups":  # all codecs are tried by the same client's groups
        codecs = [codecs[0], codecs[-1]]
    sent = records(len(client.name), codecs, headers=release.headers, text=client.text)
    name = f"matrix-{uuid.uuid4().hex[:12]}"
    return {
        "client": client.library,
        "mode": client.mode,
        "bootstrap": bootstrap,
        "topic": name,
        "group": f"group-of-{name}",
        "broker": ".".join(release.version.split(".")[: 4 if release.version.startswith("0") else 3]),
        "records": sent,
        "first": len(sent) // 2,
        "security": case.way.client(brokers.security, proxied=proxied),
        "output": str(folder / "output"),
        "folder": str(folder),
        "guarantee": _guarantee(case),
    }


def _guarantee(case: Case) -> str:
    """`processing.guarantee` of Kafka Streams: the strongest one that both sides have (KIP-447)."""
    if case.release.number < (2, 5):
        return "at_least_once"
    return "exactly_once_v2" if case.client.library >= "3" else "exactly_once_beta"


def run(case: Case, brokers: Brokers, bootstrap: str, folder: Path, *, proxied: bool) -> Outcome:
    """Runs the driver once, and judges. proxied: a connection to a broker is a Leak."""
    folder = folder / uuid.uuid4().hex[:8]
    folder.mkdir(parents=True)
    wanted = job(case, brokers, bootstrap, folder, proxied=proxied)
    brokers.create_topics(*([wanted["topic"]] + ([f"{wanted['topic']}-out"] if case.client.mode == "streams" else [])))
    if case.client.mode == "share" and case.release.number >= (4, 1):
        brokers.create_share_group(wanted["group"])
    (folder / "job.json").write_text(json.dumps(wanted))
    start = time.monotonic()
    with (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [*case.client.command(), str(folder / "job.json")],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env={**os.environ, "NODE_NO_WARNINGS": "1", "KAFKAJS_NO_PARTITIONER_WARNING": "1"},
        )
    watcher = _Watcher(process.pid, set(brokers.hosts)) if proxied else None
    try:
        status: int | None = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end(process)
    seconds = time.monotonic() - start
    if watcher is not None:
        watcher.stop()
    reason = "" if status == 0 else _reason((folder / "errors").read_text(errors="replace"), status)
    received = []
    with suppress(FileNotFoundError):
        received = [json.loads(line) for line in (folder / "output").read_text().splitlines() if line.endswith("}")]
    if not reason:
        reason = fault(wanted["records"], received, ordered=case.client.ordered, dense=case.client.dense) or ""
    return Outcome(case, _FAILS if reason else _WORKS, reason, len(received), seconds)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a driver and what it started."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


class _Watcher:
    """Looks at the sockets of a process and its children until stopped; `stop` raises Leak if one led to a broker."""

    def __init__(self, pid: int, hosts: set[str]) -> None:
        self._pid = pid
        self._hosts = hosts
        self._leaks: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(0.1):
            with suppress(psutil.Error):
                process = psutil.Process(self._pid)
                for one in (process, *process.children(recursive=True)):
                    for connection in one.net_connections("tcp"):
                        if connection.raddr and connection.raddr.ip in self._hosts:
                            self._leaks.add(f"{connection.raddr.ip}:{connection.raddr.port}")

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        if self._leaks:
            raise Leak(f"a client's socket led to a broker: {sorted(self._leaks)}")


def _reason(text: str, status: int | None) -> str:
    """What a client says of its failure, in one line."""
    if status is None:
        return f"nothing happened for {TIMEOUT_S} s"
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(("at ", "...", "%"))
    ]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    told = [line for line in lines if "rror" in line or "xception" in line or "refused" in line]
    found = (causes or told[-1:] or lines[-1:] or [f"exited {status}"])[-1]
    return found.removeprefix("Caused by: ")[:_REASON_CHARACTERS]


def run_release(brokers: Brokers, cases: Sequence[Case], folder: Path, jobs: int) -> Iterator[Outcome]:
    """These cases of one release; then whether anybody reached a broker past kproxy. Raises Leak if so."""
    ways = list(dict.fromkeys(case.way for case in cases))
    with Proxy(brokers, ways, folder / "kproxy") as proxy:
        before = brokers.client_peers()
        failed = []
        with ThreadPoolExecutor(jobs) as pool, _cancelled_at_a_fault(pool):
            possible = [case for case in cases if case.way in proxy.listens]
            # a broker without that mechanism is asked without kproxy, which could not even be configured
            failed += [Outcome(case, _FAILS) for case in cases if case.way not in proxy.listens]
            running = [
                pool.submit(run, case, brokers, proxy.bootstrap_of(case.way), folder, proxied=True) for case in possible
            ]
            for future in running:
                outcome = future.result()
                if outcome.state == _WORKS:
                    yield outcome
                else:
                    failed.append(outcome)
            _check(proxy, brokers, before)
            yield from pool.map(lambda outcome: judged(outcome, lambda: _direct(outcome.case, brokers, folder)), failed)


def _direct(case: Case, brokers: Brokers, folder: Path) -> Outcome:
    return run(case, brokers, brokers.bootstrap(case.way.listener), folder, proxied=False)


def judged(outcome: Outcome, direct: Callable[[], Outcome]) -> Outcome:
    """What comes of a case that did not work through kproxy. direct(): runs it once without kproxy."""
    case = outcome.case
    if case.client.unsigned and case.way.own and case.way.mechanism == OAUTHBEARER:
        return replace(outcome, state=_CANNOT, reason="it makes its tokens itself and signs none")
    is_lacking = bool(case.way.mechanism) and case.way.mechanism not in case.release.mechanisms
    for _ in range(2):
        found = direct()
        if found.state == _WORKS or found.reason.startswith(_DRIVER_FAULTS):
            return outcome
        if is_lacking or _LACKS.search(found.reason):
            break
        if _TIMED_OUT.search(found.reason):
            return replace(found, state=OPEN)
    return replace(found, state=_CANNOT)


@contextmanager
def _cancelled_at_a_fault(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Whoever is interrupted waits for the cases that run, not for all."""
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _check(proxy: Proxy, brokers: Brokers, before: Any) -> None:
    """Every connection that a broker accepted is one of kproxy, and kproxy saw nothing that it could not handle."""

    def strangers() -> Any:
        return brokers.client_peers() - before - proxy.sources()

    try:
        wait_for("kproxy's log", lambda: not strangers(), 30)
    except AssertionError:
        raise Leak(f"not connections of kproxy: {strangers()}") from None
    for name in ("kproxy_address_leaks_total", "kproxy_protocol_faults_total", "kproxy_unbound_brokers_total"):
        if count := proxy.metric(name):
            raise Leak(f"{name} is {count:.0f}: see {proxy.log}")
    if "Traceback" in proxy.log.read_text():
        raise Leak(f"an exception in kproxy: see {proxy.log}")
