"""The process of the cluster and its clients: its reports and its end."""

import json
import socket
import subprocess
import sys

from kproxy.demo import world


def start():
    return subprocess.Popen(
        [sys.executable, "-m", world.__name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_it_reports_its_brokers_and_ends_with_its_input():
    with start() as process:
        brokers = json.loads(process.stdout.readline())
        assert len(brokers) == 3
        for host, port in brokers:
            socket.create_connection((host, port), timeout=60).close()
        assert process.communicate(timeout=60) == (b"", b"")
        assert process.returncode == 0


def test_its_clients_bootstrap_where_the_parent_says():
    with socket.create_server(("127.0.0.1", 0)) as listener, start() as process:
        process.stdout.readline()
        process.stdin.write(json.dumps(listener.getsockname()).encode() + b"\n")
        process.stdin.flush()
        listener.settimeout(30)
        listener.accept()[0].close()
        assert process.communicate(timeout=60) == (b"", b"")
        assert process.returncode == 0
