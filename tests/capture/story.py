"""A small synthetic capture, packet by packet, with everything that can happen to connections."""

from kproxy.capture.dissection.packets import ACK, FIN, RST, SYN
from kproxy.protocol import codec
from tests.capture import packet

MS = 1_000_000
BEGIN_NS = 1_700_000_000 * 1_000_000_000
ALERT = b"\x15\3\3\0\2\2\x2a"  # TLS: fatal, bad certificate
HELLO = b"\x16\3\1\0\x05\1\0\0\1\0"
TICK_NS = 100_000  # between two packets, by default


def request(number):
    """A Heartbeat request."""
    header = {"requestApiKey": 12, "requestApiVersion": 0, "correlationId": number, "clientId": "me"}
    body = codec.encode_request(header, {"groupId": "g", "generationId": 1, "memberId": "m"})
    return len(body).to_bytes(4) + body


def answer(number):
    body = codec.encode_response(12, 0, {"correlationId": number}, {"errorCode": 0 if number % 3 else 27})
    return len(body).to_bytes(4) + body


class Story:
    """Packets in the order of their capture: (time_ns, bytes, length on the wire)."""

    def __init__(self, begin_ns=BEGIN_NS):
        self.packets = []
        self.now = begin_ns

    def wait(self, ns):
        self.now += ns
        return self

    def add(self, data, length=None):
        self.packets.append((self.now, data, length or len(data)))
        self.now += TICK_NS

    def copy(self, count, back=0):
        """Repeat `count` packets that end `back` packets before the last."""
        end = len(self.packets) - back
        for _, data, length in self.packets[end - count : end]:
            self.add(data, length)


class Line:
    """One connection: each side sends its bytes in order, unless `at` gives the position of a retransmission."""

    def __init__(self, story, port, isn=None):
        self.story = story
        isn = isn or (port * 1000, port * 5000)
        self.ends = ((packet.CLIENT[0], port), packet.BROKER)
        self.next = list(isn)
        self.sent = 0

    def frame(self, side, payload=b"", flags=ACK, *, window=500, at=None, ack=None):
        source, target = self.ends[side], self.ends[1 - side]
        seq = self.next[side] if at is None else at
        acked = self.next[1 - side] if ack is None else ack
        made = packet.tcp(
            payload,
            source=source,
            target=target,
            seq=seq & 0xFFFFFFFF,
            ack=acked & 0xFFFFFFFF if flags & ACK else 0,
            flags=flags,
            window=window,
        )
        self.sent += 1
        if at is None:
            self.next[side] += len(payload) + bool(flags & (SYN | FIN))
        return packet.ethernet(packet.ipv4(made, source=source, target=target, identity=self.ends[0][1] + self.sent))

    def send(self, side, payload=b"", flags=ACK, **how):
        self.story.add(self.frame(side, payload, flags, **how))
        return self

    def lose(self, side, payload):
        """Bytes that were sent but not captured."""
        self.frame(side, payload)
        return self

    def shake(self):
        return self.send(0, flags=SYN).send(1, flags=SYN | ACK).send(0)

    def ask(self, *numbers):
        for number in numbers:
            self.send(0, request(number)).send(1, answer(number))
        return self

    def close(self):
        return self.send(0, flags=FIN | ACK).send(1, flags=FIN | ACK).send(0)


def lossy(story, port, isn):
    """Retransmissions of every kind, reordered segments, closed windows and a probe, then both ends."""
    line = Line(story, port, isn).shake().ask(1)
    # a request in two segments, the first of which arrives as late as reordering allows, and a bit later
    for number, late_ns in ((2, 3 * MS), (3, 3 * MS + 1000)):
        begun, data = line.next[0], request(number)
        line.lose(0, data[:9]).send(0, data[9:])
        story.wait(late_ns - TICK_NS)
        line.send(0, data[:9], at=begun).send(1, answer(number))
    # a response that is retransmitted twice until it is acknowledged, once too early and with further bytes
    line.send(0, request(4)).send(1, b"", ack=line.next[0])
    begun = line.next[1]
    line.send(1, answer(4))
    story.wait(200 * MS)
    line.send(1, answer(4), at=begun)
    story.wait(400 * MS)
    line.send(1, answer(4), at=begun).send(0)
    line.send(1, answer(4), at=begun)  # and once unnecessarily
    # a segment that repeats the end of the previous one
    begun = line.next[0]
    line.send(0, request(5)[:12])
    line.send(0, request(5)[8:], at=begun + 8)
    line.next[0] = begun + len(request(5))
    line.send(1, answer(5))
    # the broker closes its window during a request, the client during a response
    line.send(0, request(6)[:9]).send(1, window=0)
    story.wait(30 * MS)
    line.send(0, b"\0", at=line.next[0] - 1).send(1, window=0)  # a probe
    line.send(1).send(0, request(6)[9:]).send(1, answer(6)[:5]).send(0, window=0)
    story.wait(20 * MS)
    line.send(0, window=1).send(1, answer(6)[5:])
    # two requests at once, answered in one segment
    line.send(0, request(7) + request(8)).send(1, answer(7) + answer(8))
    return line.ask(9).close()


def holes(story, port):
    """A request that was not captured, half a response, and segments truncated by the snap length."""
    line = Line(story, port).shake().ask(1).lose(0, request(2)).send(1, answer(2))
    for number in range(3, 40):
        line.ask(number)
    line.send(0, request(40)).lose(1, answer(40)[:6]).send(1, answer(40)[6:]).send(0)
    frame = line.frame(0, request(41))
    story.add(frame[:-7], len(frame))
    line.send(1, answer(41))
    return line.ask(42).send(0, request(43)).send(1, flags=RST)


def twice(story, port):
    """Packets captured twice; then the client's reset, and packets in flight."""
    line = Line(story, port).shake()
    story.copy(3)
    line.ask(1)
    story.copy(2)
    line.ask(2, 3)
    story.copy(4)
    line.send(0, request(4)).send(0, flags=RST).send(1, answer(4)).send(1, b"late", at=line.next[1] - 4)
    return line


def waits(story, port):
    """Segments that wait for a lost one while others pass, a response that is late for that reason, and no end."""
    line = Line(story, port).shake().ask(1).send(0, request(2))
    begun, data = line.next[1], answer(2) + answer(3)
    line.send(0, request(3)).lose(1, data[:10])
    for start in range(10, len(data), 6):
        line.send(1, data[start : start + 6])
    line.send(0, ack=begun)
    story.wait(40 * MS)
    line.send(1, data[2:13], at=begun + 2).send(1, data[:4], at=begun).send(0)
    line.ask(4, 5).send(0, request(6))
    begun = line.next[1]
    line.send(1, answer(6))
    story.wait(50 * MS)
    line.send(1, answer(6), at=begun)  # without an acknowledgement
    return line


def routed(story, port):
    """A router reports packets that are too large, and a connect that it does not forward."""
    line = Line(story, port).shake()
    frame = line.frame(0, request(1))
    story.add(frame)
    for mtu in (1400, 1300, 1500, 67):
        story.add(reported(4, frame, mtu))
    line.send(1, answer(1)).ask(2).close()
    frame = Line(story, port + 1).frame(0, flags=SYN)
    story.add(frame)
    story.add(reported(13, frame))


def reported(code, frame, mtu=0):
    message = packet.icmp(3, code, mtu, frame[14:42])
    return packet.ethernet(packet.ipv4(message, protocol=1, source=(b"\x0a\0\0\x63", 0), target=packet.CLIENT))


def middle(story, port, isn):
    """Joined midstream, the broker's bytes first; it stays open."""
    line = Line(story, port, isn).send(1, answer(0))
    return line.ask(1, 2, 3).send(0, request(4))


def packets_of_story(begin_ns=BEGIN_NS, first=(0xFFFF_FFC0, 7), joined=(0xFFFF_FFF0, 0x7FFF_FFF0)):
    """The packets of all connections; first, joined: sequence numbers of two of them."""
    story = Story(begin_ns)
    lossy(story, 40001, first)
    holes(story, 40002)
    twice(story, 40003)
    middle(story, 40004, joined)
    waits(story, 40005)
    routed(story, 40031)
    story.wait(-TICK_NS)  # two packets at the same time
    Line(story, 40006).shake().ask(1).close()
    story.wait(-2 * TICK_NS)  # and one before another
    # connects: refused, unanswered, closed at once, given up
    Line(story, 40011).send(0, flags=SYN).send(1, flags=RST | ACK, at=0)
    Line(story, 40012).send(0, flags=SYN).send(0, flags=SYN, at=40_012_000).send(0, flags=SYN, at=40_012_000)
    Line(story, 40013).shake().send(1, flags=FIN | ACK).send(0, flags=FIN | ACK)
    Line(story, 40014).shake().send(0, flags=FIN | ACK).send(1, flags=FIN | ACK)
    # TLS that the server refuses, unanswered TLS, a client without TLS at a TLS port, and others
    Line(story, 40021).shake().send(0, HELLO).send(1, ALERT).close()
    Line(story, 40022).shake().send(0, HELLO).close()
    Line(story, 40023).shake().send(0, request(1)).send(1, ALERT).close()
    Line(story, 40024).shake().send(0, b"GET / HTTP/1.1\r\n\r\n").close()
    Line(story, 40025).shake().send(0, b"SSH-2.0-OpenSSH\r\n").close()
    # the ports of the first connection again
    Line(story, 40001, (77, 99)).shake().ask(1, 2)
    Line(story, 40001, (7777, 9999)).shake().ask(1).close()
    return story.packets
