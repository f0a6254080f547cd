"""Bytes from the literals of source code."""

import pytest

from kproxy.protocol.shown.literals import bytes_of_literal

FRAME = bytes.fromhex("0000000d001200000000000700036f276f")  # it has a printable byte, and a quote
ARRAY = ", ".join(f"0x{byte:02x}" for byte in FRAME)
ESCAPED = "".join(f"\\x{byte:02x}" for byte in FRAME)
WIRESHARK = f"""/* Frame (17 bytes) */
static const unsigned char pkt1[17] = {{
{ARRAY[:48]} /* ........ */
{ARRAY[48:]}  // the rest
}};
"""


@pytest.mark.parametrize(
    "text",
    [
        repr(FRAME),
        f" {FRAME!r};\n",
        f"bytearray({FRAME!r})",
        f"({FRAME[:9]!r}\n {FRAME[9:]!r})",
        f"{FRAME[:9]!r}\n{FRAME[9:]!r}\n",
        f"b{ESCAPED}",  # the shell removed the quotes
        f'"{ESCAPED}"',
        f'"{ESCAPED[:32]}" \\\n"{ESCAPED[32:]}";',
        f"{{ {ARRAY} }};",
        f"{{{ARRAY.upper().replace('X', 'x')},}}",
        f"[]byte{{{ARRAY}}}",
        WIRESHARK,
    ],
)
def test_a_literal_is_read(text):
    assert bytes_of_literal(text.encode()) == FRAME


@pytest.mark.parametrize(
    "text",
    ["0012", "b'", '"0012"', "{}", "{ 0x100 }", "{ 12, 13 }", '{"hex": "00"}', "b\\x0", "('a', b'b')", "(" * 9999],
)
def test_other_text_is_no_literal(text):
    assert bytes_of_literal(text.encode()) is None
