"""A TLS socket does what a plain one does, at any split of bytes, however little the kernel takes."""

import ctypes
import ctypes.util
import socket
import ssl
from contextlib import contextmanager, suppress

import pytest

from kproxy.proxy.sockets.sockets import READ_BYTES
from kproxy.proxy.tls.tls_socket import TlsSocket
from tests.certificates import Authority


@pytest.fixture(scope="module")
def contexts(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("ca"))
    certificate = authority.server()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate.certificate, certificate.key)
    return server, ssl.create_default_context(cafile=authority.bundle)


@pytest.fixture
def ends(contexts):
    """(ours, Python's own at the other end) after the handshake."""
    one, other = socket.socketpair()
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours = TlsSocket(one, contexts[0], memoryview(bytearray(READ_BYTES)), server_side=True)
    theirs = contexts[1].wrap_socket(other, server_hostname="localhost", do_handshake_on_connect=False)
    done = [False, False]
    while not all(done):
        with suppress(ssl.SSLWantReadError):
            theirs.do_handshake()
            done[0] = True
        if not done[1]:
            try:
                ours.fetch()
            except BlockingIOError:
                continue
            done[1] = ours.step()
            _flush(ours, theirs)
    with ours, theirs:
        yield ours, theirs


def _flush(ours, theirs):
    while True:
        try:
            return ours.flush()
        except BlockingIOError:
            with suppress(ssl.SSLWantReadError):
                theirs.do_handshake()


def taken(theirs, at_most=1 << 20):
    try:
        return theirs.recv(at_most)
    except ssl.SSLWantReadError:
        return b""


def test_bytes_that_the_kernel_does_not_take_are_sent_later_once_and_whole(ends):
    ours, theirs = ends
    data = bytes(range(256)) * 4000
    unsent, got, blocked, turns = memoryview(data), b"", 0, 0
    while unsent:
        turns += 1
        try:
            unsent = unsent[ours.send(unsent[: 1 + turns * 7919 % 100_000]) :]
        except BlockingIOError:
            blocked += 1
        got += taken(theirs)
    while part := taken(theirs):
        got += part
    assert got == data
    assert blocked > 20


def test_the_last_byte_is_not_reported_before_all_has_left(ends):
    ours, theirs = ends
    data = b"x" * 200_000
    assert ours.send(data) == len(data) - 1
    with pytest.raises(BlockingIOError):
        ours.send(data[-1:])
    got = 0
    while got < len(data):
        got += len(taken(theirs))
        try:
            left = ours.send(data[-1:])
        except BlockingIOError:
            continue
        assert left == 1
        break
    while part := taken(theirs):
        got += len(part)
    assert got == len(data)


def test_a_peek_and_short_reads_lose_nothing(ends):
    ours, theirs = ends
    theirs.send(b"a question of many bytes")
    theirs.send(b", and more")
    assert ours.recv(10, socket.MSG_PEEK) == ours.recv(10, socket.MSG_PEEK) == b"a question"
    buffer = memoryview(bytearray(5))
    got = b""
    while True:
        try:
            got += buffer[: ours.recv_into(buffer)]
        except BlockingIOError:
            break
        assert ours.leftover or got.endswith(b"more") or len(got) == 24
    assert got == b"a question of many bytes, and more"


def test_after_its_own_end_it_still_reads(ends):
    ours, theirs = ends
    theirs.send(b"before")
    ours.shutdown(socket.SHUT_WR)
    assert ours.recv(100) == b"before"
    theirs.send(b"after")
    assert ours.recv(100) == b"after"
    assert taken(theirs) == b""  # a clean end: ssl raises at any other
    with pytest.raises(ssl.SSLError):
        theirs.unwrap() if ours.send(b"no") else None


def test_a_close_notify_is_an_end_however_it_arrives(ends):
    ours, theirs = ends
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    theirs.send(b"last")
    with pytest.raises(ssl.SSLWantReadError):
        theirs.unwrap()
    buffer = memoryview(bytearray(READ_BYTES))
    assert ours.recv_into(buffer) == 4
    assert ours.recv_into(buffer) == 0
    assert ours.recvmsg_into([buffer])[0] == 0


def test_damaged_bytes_are_an_error_and_an_alert(ends):
    ours, theirs = ends
    socket.socket.send(theirs, b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(ssl.SSLError):
        ours.recv(1)
    with pytest.raises(ssl.SSLError, match=r"(?i)alert"):
        taken(theirs)


@contextmanager
def keyed(contexts, send_bytes, renewals=0):
    """(ours, the other socket, libssl, its SSL on that socket): Python's own ssl asks for no new keys.

    renewals: how many new keys come right behind the last bytes of the handshake.
    """
    library = ctypes.CDLL(ctypes.util.find_library("ssl") or pytest.skip("needs libssl: Python asks for no new keys"))
    for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
        getattr(library, name).restype = ctypes.c_void_p
    one, other = socket.socketpair()
    for end in (one, other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
    theirs = ctypes.c_void_p(
        library.SSL_new(ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method()))))
    )
    library.SSL_set_fd(theirs, other.fileno())
    other.setblocking(False)
    ours = TlsSocket(one, contexts[0], memoryview(bytearray(READ_BYTES)), server_side=True)
    done = theirs_done = False
    library.SSL_set_connect_state(theirs)
    while not (done and theirs_done):
        if not theirs_done and library.SSL_do_handshake(theirs) == 1:
            theirs_done = True
            for _ in range(renewals):
                library.SSL_key_update(theirs, 0)
                library.SSL_do_handshake(theirs)
        with suppress(BlockingIOError):
            ours.fetch()
        done = done or ours.step()
        with suppress(BlockingIOError):
            ours.flush()
    with ours, other:
        yield ours, other, library, theirs


def renewed(ours, library, theirs, *, asks=0, data=b""):
    """The peer's key update, followed by data."""
    library.SSL_key_update(theirs, asks)
    library.SSL_do_handshake(theirs)
    assert not data or library.SSL_write(theirs, data, len(data)) == len(data)
    return socket.socket.recv(ours, 1 << 20)


def test_a_peer_that_asks_for_new_keys_without_end_and_reads_none_is_given_up(contexts):
    view = memoryview(bytearray(READ_BYTES))
    with keyed(contexts, 32 * 1024) as (ours, other, library, theirs), pytest.raises(ssl.SSLError, match="reads none"):
        for _ in range(20_000):
            other.sendall(renewed(ours, library, theirs, asks=1, data=bytes(8192)))
            while ours.recv_into(view) < 8192 and ours.leftover:
                pass


@pytest.mark.parametrize("asks", [0, 1])
@pytest.mark.parametrize("cut", [1, 5, 26, 27, 28, 1000, 1 << 17])
def test_new_keys_without_data_are_given_up_before_they_are_much_work(contexts, asks, cut):
    """OpenSSL takes up to 0.2 ms for each, and one call of it goes through all that it was given."""
    view = memoryview(bytearray(READ_BYTES))
    with keyed(contexts, 1 << 20) as (ours, other, library, theirs):
        encrypted = b"".join([renewed(ours, library, theirs, asks=asks) for _ in range(200)])
        with pytest.raises(ssl.SSLError, match="again and again"):
            while encrypted or ours.leftover:
                other.sendall(encrypted[:cut])
                encrypted = encrypted[cut:]
                with suppress(BlockingIOError):
                    ours.recv_into(view)
                assert ours._fed <= 16
        assert ours._without_data <= 32 + 16


@pytest.mark.parametrize("cut", [1, 4096, 1 << 17])
def test_a_peer_that_renews_its_key_between_data_goes_on(contexts, cut):
    view = memoryview(bytearray(READ_BYTES))
    with keyed(contexts, 1 << 20) as (ours, other, library, theirs):
        data = [bytes([number]) * 4096 for number in range(36)]  # 32 renewals without data would be its end
        encrypted = b"".join([renewed(ours, library, theirs, data=each) for each in data])
        got = b""
        while encrypted or ours.leftover:
            other.sendall(encrypted[:cut])
            encrypted = encrypted[cut:]
            with suppress(BlockingIOError):
                got += view[: ours.recv_into(view)]
        assert got == b"".join(data)


def test_new_keys_right_behind_the_handshake_are_no_more_work(contexts):
    view = memoryview(bytearray(READ_BYTES))
    with keyed(contexts, 1 << 20, renewals=600) as (ours, _, _, _):
        came = len(ours._behind)
        assert ours.leftover and came > 500 * 27
        with pytest.raises(BlockingIOError):
            ours.recv_into(view)
        assert came - len(ours._behind) <= 17 * 27
        with pytest.raises(ssl.SSLError, match="again and again"):
            while ours.leftover:
                with suppress(BlockingIOError):
                    ours.recv_into(view)


@pytest.fixture
def tiny(contexts):
    """(ours, the socket that leads to it, 15,360 records of one byte each on their way)"""
    one, other = socket.socketpair()
    for end in (one, other):
        end.setblocking(False)
    ours = TlsSocket(one, contexts[0], memoryview(bytearray(READ_BYTES)), server_side=True)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = contexts[1].wrap_bio(incoming, outgoing, server_hostname="localhost")
    done = [False, False]
    while not all(done):
        with suppress(ssl.SSLWantReadError):
            theirs.do_handshake()
            done[0] = True
        other.send(outgoing.read() or b"")
        with suppress(BlockingIOError):
            ours.fetch()
        done[1] = done[1] or ours.step()
        ours.flush()
        with suppress(BlockingIOError):
            incoming.write(other.recv(1 << 16))
    for byte in TINY:
        theirs.write(bytes([byte]))
    with ours, other:
        yield ours, other, outgoing.read()


TINY = bytes(range(256)) * 60


def test_one_read_takes_few_tiny_records_and_the_others_wait_outside_of_openssl(tiny):
    """A record of one byte costs as much as one of a kilobyte, and 512 KiB hold 20,000 of them."""
    ours, other, encrypted = tiny
    sizes = []
    ours.on_leftover = lambda: sizes.append(len(ours._behind))
    got, most = b"", 0
    view = memoryview(bytearray(READ_BYTES))
    while len(got) < len(TINY):
        with suppress(BlockingIOError):
            encrypted = encrypted[other.send(encrypted) :]
        with suppress(BlockingIOError):
            count = ours.recv_into(view)
            assert count <= 256
            got += view[:count]
        most = max(most, ours._incoming.pending)
    assert got == TINY
    assert most <= 64 * 1024 < max(sizes)
    assert not ours.leftover and not ours._behind
