"""Times of arrival of bytes, from the kernel's timestamps."""

import socket
import time
from contextlib import closing

from kproxy.proxy.sockets import sockets
from tests.proxy.live import arrival_times


def test_the_time_of_arrival_is_that_of_the_last_segment_and_not_of_the_read():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    with closing(here), closing(there), arrival_times():
        sockets.prepare(here)
        here.setblocking(True)
        there.send(b"one")
        time.sleep(0.01)
        before = time.time_ns()
        there.send(b"two")
        buffer = bytearray(100)
        while here.recv_into(buffer, 0, socket.MSG_PEEK) < len(b"onetwo"):  # a busy kernel may deliver it later
            pass
        after = time.time_ns()
        time.sleep(0.01)
        count, arrived = sockets.receive_timed(here.recvmsg_into, buffer)
        assert buffer[:count] == b"onetwo"
        assert arrived is not None and before <= arrived <= after
        there.close()
        assert sockets.receive_timed(here.recvmsg_into, buffer)[0] == 0


def test_missing_times_of_arrival_are_no_error():
    buffer = bytearray(10)
    assert sockets.receive_timed(lambda *_: (3, [], 0, None), buffer) == (3, None)
    foreign = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"1234"), (socket.SOL_SOCKET, 35, b"12345678")]
    assert sockets.receive_timed(lambda *_: (3, foreign, 0, None), buffer) == (3, None)
