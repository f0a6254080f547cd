"""The key of a segment: addresses and ports of its sender and receiver, as bytes of the packet.

Duty: functions of a key alone. Refuses to know packets and connections.
"""

from zlib import crc32

SHARDS = 16  # fixed: which flows are together must not depend on the number of processes

Pair = tuple[bytes, bytes]  # a connection's keys, the smaller one first


def back(key: bytes) -> bytes:
    """The key of the other direction."""
    half = len(key) // 2 - 2
    return key[half : 2 * half] + key[:half] + key[-2:] + key[-4:-2]


def pair_of(key: bytes) -> Pair:
    """Both keys of a connection, from either of them."""
    other = back(key)
    return (key, other) if key < other else (other, key)


def shard_of(key: bytes) -> int:
    """The shard of a flow, the same for both directions and in every process."""
    return hash_of(key) % SHARDS


def hash_of(key: bytes) -> int:
    """A hash of 32 bits of a connection's ends, the same for both directions and in every process."""
    half = len(key) // 2 - 2
    a, b = key[:half] + key[-4:-2], key[half : 2 * half] + key[-2:]
    return crc32(a + b if a < b else b + a)
