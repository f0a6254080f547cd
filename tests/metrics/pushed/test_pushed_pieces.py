"""A large push in pieces has the same content as in one piece, and every step of the work is small."""

import pytest
from google.protobuf.message import DecodeError
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

from kproxy.errors import Malformed
from kproxy.metrics.pushed import pushed_pieces
from kproxy.metrics.pushed.pushed_pieces import MAX_FIELDS, OTHER_BYTES, PIECE_BYTES, pieces
from kproxy.protocol.primitives import write_uvarint

LEVELS = 4  # around a data point


def points(data: MetricsData) -> list[object]:
    """Each data point with all that encloses it."""
    return [
        (
            of_resource.resource.SerializeToString(deterministic=True),
            (scope.scope.name, scope.schema_url),
            (metric.name, metric.description, metric.unit, kind),
            (getattr(metric.sum, "aggregation_temporality", 0), metric.sum.is_monotonic),
            point.SerializeToString(deterministic=True),
        )
        for of_resource in data.resource_metrics
        for scope in of_resource.scope_metrics
        for metric in scope.metrics
        for kind in [metric.WhichOneof("data")]
        for point in getattr(metric, kind).data_points
    ]


def made(resources: int, scopes: int, metrics: int, of_each: int) -> MetricsData:
    data = MetricsData()
    for resource in range(resources):
        of_resource = data.resource_metrics.add()
        of_resource.resource.attributes.add(key="host").value.string_value = f"h{resource}"
        for number in range(scopes):
            scope = of_resource.scope_metrics.add(schema_url=f"url{number}")
            scope.scope.name = f"scope{number}"
            for index in range(metrics):
                metric = scope.metrics.add(name=f"m{index}", unit="ms", description="d" * index)
                of_kind = metric.sum if index % 2 else metric.gauge
                if index % 2:
                    metric.sum.is_monotonic = bool(index % 3)
                    metric.sum.aggregation_temporality = 1 + index % 2
                for point in range(of_each):
                    added = of_kind.data_points.add(as_double=point * 1.5, time_unix_nano=1 << 60)
                    added.attributes.add(key="topic").value.string_value = f"t{point}" * (point % 20)
    return data


@pytest.mark.parametrize("piece_bytes", [1, 60, 500, 5000, PIECE_BYTES])
@pytest.mark.parametrize("shape", [(1, 1, 1, 200), (1, 1, 50, 3), (3, 4, 5, 6), (1, 1, 2, 800), (0, 0, 0, 0)])
def test_the_pieces_together_have_the_same_data_points(shape, piece_bytes, monkeypatch):
    monkeypatch.setattr(pushed_pieces, "PIECE_BYTES", max(piece_bytes, 500 if shape == (1, 1, 2, 800) else 160))
    data = made(*shape)
    whole = data.SerializeToString()
    cut = [piece for piece in pieces(whole) if piece is not None]
    assert [point for piece in cut for point in points(MetricsData.FromString(piece))] == points(data)
    assert max(map(len, cut)) <= pushed_pieces.PIECE_BYTES + LEVELS * 200


def test_the_largest_push_is_parsed_in_small_pieces_and_walked_in_small_steps(monkeypatch):
    walked = []
    fields = pushed_pieces._fields

    def counting(message):
        for found in fields(message):
            walked[-1] += 1
            yield found

    monkeypatch.setattr(pushed_pieces, "_fields", counting)
    data = made(1, 1, 2, 9000)
    whole = data.SerializeToString()
    assert len(whole) > 1 << 20
    walked.append(0)
    sizes = []
    for piece in pieces(whole):
        sizes.append(len(piece) if piece is not None else 0)
        walked.append(0)
    assert max(sizes) <= PIECE_BYTES + 1000 and sum(sizes) >= len(whole)
    assert max(walked) <= 2 * pushed_pieces.PER_STEP


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x0a\xff\xff\xff\x7f" + bytes(100), "end within a field"),
        (b"\x0b" * 100_000, "wire type 3"),
        (b"\xff" * 100_000, "ten bytes"),
        (b"\x00\x01" * 50_000, "without a number"),
        (b"\x12\x64" + bytes(100) * 1, None),  # an unknown field is passed on
        (b"\x08\1" + b"\x09" + b"\1" * 8 + b"\x15" + b"\1" * 4 + b"\x10\x96\1", None),  # of each wire type
        (b"\x08", "end within a field"),
        (b"\x11" + bytes(7), "end within a field"),
        (b"\x15" + bytes(3), "end within a field"),
        (b"\x12" + b"\xa0\x8d\x06" + bytes(100_000), "beside its list"),
        (b"\x0a", "end within a field"),
    ],
)
def test_what_cannot_be_cut_is_refused(data, said):
    if said is None:
        assert [piece for piece in pieces(data) if piece] == [data]
        return
    with pytest.raises(Malformed, match=said):
        list(pieces(data))


def field(number: int, kind: int, tag_bytes: int, value: bytes) -> bytes:
    """A field whose tag takes so many bytes: more than need be, which protobuf allows."""
    tag = number << 3 | kind
    return bytes(tag >> 7 * at & 127 | (at < tag_bytes - 1) << 7 for at in range(tag_bytes)) + value


@pytest.mark.parametrize("kind", range(8))
@pytest.mark.parametrize("size", [*range(13), 127, 128, 129])
def test_a_message_is_split_into_fields_like_in_protobuf(kind, size):
    """For values of every wire type and length, the same messages are read and refused as by protobuf."""
    for value in (b"\xff" * (size - 1) + b"\1" if kind == 0 and size else bytes(size), b"\x80" * size + b"\0"):
        data = field(9, kind, 2, (write_uvarint(size) if kind == 2 else b"") + value) + field(8, 0, 1, b"\5")
        try:
            MetricsData.FromString(data)
        except DecodeError:
            with pytest.raises(Malformed):
                list(pieces(data))
        else:
            assert kind in (3, 4) or [*pieces(data)] == [data]


@pytest.mark.parametrize("tag_bytes", range(2, 12))
def test_a_varint_may_have_up_to_ten_bytes(tag_bytes):
    """A length and an ignored number; protobuf itself, which is not used here, allows only shorter tags."""
    number = b"\x80" * (tag_bytes - 1) + b"\0"
    for data in (field(9, 0, 1, number), field(9, 2, 1, number)):
        if tag_bytes > 10:
            with pytest.raises(Malformed, match="ten bytes"):
                list(pieces(data))
        else:
            assert [*pieces(data)] == [data]


@pytest.mark.parametrize("excess", [0, 1])
def test_fields_next_to_a_list_have_a_limit_of_bytes(excess):
    data = b"\x12" + write_uvarint(OTHER_BYTES - 3 + excess) + bytes(OTHER_BYTES - 3 + excess)
    assert len(data) == OTHER_BYTES + excess
    if excess:
        with pytest.raises(Malformed, match="beside its list"):
            list(pieces(data))
    else:
        assert [*pieces(data)] == [data]


def test_a_piece_holds_as_much_as_fits(monkeypatch):
    """Two resources with two metrics each, together or one by one."""
    data = made(2, 1, 2, 1)
    for resource in data.resource_metrics:
        for metric in resource.scope_metrics[0].metrics:
            metric.name, metric.description = "name", "says"
    whole = data.SerializeToString()
    each = len(whole) // 2
    for room, count in ((2 * each + 1, 1), (2 * each, 1), (2 * each - 1, 2), (each, 2)):
        monkeypatch.setattr(pushed_pieces, "PIECE_BYTES", room)
        cut = [piece for piece in pieces(whole) if piece is not None]
        assert len(cut) == count
        assert [point for piece in cut for point in points(MetricsData.FromString(piece))] == points(data)


def test_one_point_of_very_much_is_refused_and_points_without_end_too():
    data = MetricsData()
    point = data.resource_metrics.add().scope_metrics.add().metrics.add(name="m").gauge.data_points.add()
    for number in range(5000):
        point.attributes.add(key=f"k{number}").value.string_value = "v" * 20
    with pytest.raises(Malformed, match="NumberDataPoint of the pushed metrics has"):
        list(pieces(data.SerializeToString()))
    data = MetricsData()
    of_points = data.resource_metrics.add().scope_metrics.add().metrics.add(name="m").sum.data_points
    for _ in range(MAX_FIELDS + 2):
        of_points.add()
    with pytest.raises(Malformed, match="more than 20000 points"):
        list(pieces(data.SerializeToString()))
    assert OTHER_BYTES < PIECE_BYTES
