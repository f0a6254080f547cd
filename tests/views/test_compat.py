"""The whole text for each state that a cluster can be in: its sentences, their order, and their wrapping."""

import pytest

from kproxy import __version__
from kproxy.checks.compat import Broker, Client, Compatibility, Loss
from kproxy.checks.offers import Compared
from kproxy.proxy.config.addresses import Address
from kproxy.views.compat import LISTED, WIDTH, lines

HEAD = "API                           brokers  kproxy  clients  what kproxy does"
PASSED = Compared(3, "ListOffsets", (1, 9), (1, 10), (1, 9), "passed")
ONE_VERSION = Compared(18, "ApiVersions", (4, 4), (0, 4), (4, 4), "rewritten")
CAPPED = Compared(1, "Fetch", (4, 19), (4, 18), (4, 18), "capped")
HIDDEN = Compared(99, "DescribeEverything", (7, 9), (0, 6), None, "hidden")
UNREAD = Compared(999, "unknown_999", (0, 3), None, (0, 3), "unread")
TABLE = [
    (PASSED, "ListOffsets                       1-9    1-10      1-9  passed"),
    (ONE_VERSION, "ApiVersions                         4     0-4        4  rewritten"),
    (CAPPED, "Fetch                            4-19    4-18     4-18  capped: the newest"),
    (HIDDEN, "DescribeEverything                7-9     0-6        -  hidden: not offered:"),
    (UNREAD, "unknown_999                       0-3       -      0-3  unread: byte for byte;"),
]


def one_broker(fault=""):
    return Broker(1, Address("b", 9092), None if fault else {}, fault)


ONE = (one_broker(),)


def of(apis=(PASSED,), *, brokers=ONE, differing=(), release="4.1.2", losses=(), clients=0, unknown=()):
    return Compatibility("east", tuple(brokers), tuple(apis), differing, release, tuple(losses), clients, unknown)


def loss(name="orders", gets=18, software="exotic", version="9"):
    return Loss(Client(name, software, version, None), "Fetch", 40, gets)


def before_the_table(found):
    shown = list(lines(found))
    assert all(len(line) <= WIDTH and line == line.rstrip() for line in shown)
    return shown[: shown.index(HEAD) - 1]


SERVES = f"cluster east: 1 broker(s), which serve what Kafka 4.1 serves; kproxy {__version__}"
NOTHING = "Nothing is lost: clients get every API and version that the brokers serve"
OLDER = "Clients do not get {}: this kproxy is older than the brokers; a newer one reads them."


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (of(), [f"{NOTHING}.", SERVES]),
        (of(clients=2), [f"{NOTHING}, the 2 kinds of clients seen too.", SERVES]),
        (of(release=None), [f"{NOTHING}.", f"cluster east: 1 broker(s); kproxy {__version__}"]),
        (of([CAPPED, HIDDEN]), [OLDER.format("Fetch above v18, DescribeEverything"), SERVES]),
        (
            of([CAPPED], clients=2),
            [OLDER.format("Fetch above v18") + " None of the 2 kinds of clients seen would use it.", SERVES],
        ),
        (
            of([CAPPED], clients=2, losses=[loss(), loss("", None), loss("", 18, "", "")]),
            [
                OLDER.format("Fetch above v18"),
                SERVES,
                "",
                "orders exotic 9: Fetch: could use v40, gets v18",
                "exotic 9: Fetch: could use v40, does not get it",
                "a client: Fetch: could use v40, gets v18",
            ],
        ),
        (
            of(brokers=[one_broker(), one_broker("no route")], differing=("Produce", "Fetch"), unknown=("lib 1",)),
            [
                f"{NOTHING}.",
                SERVES,
                "not asked: broker 1 at b:9092: no route",
                "brokers differ (a rolling upgrade?) in Produce, Fetch: ranges are of all together",
                "versions of these clients are unknown; they use the offered ones: lib 1",
            ],
        ),
    ],
)
def test_each_state_has_a_full_sentence(found, said):
    assert " ".join(" ".join(before_the_table(found)).split()) == " ".join(" ".join(said).split())
    assert before_the_table(found).count("") == said.count("")


def test_each_api_has_a_row_of_its_treatment():
    shown = list(lines(of([one for one, _ in TABLE])))
    rows = shown[shown.index(HEAD) + 1 :]
    assert shown[shown.index(HEAD) - 1] == ""
    assert len(rows) == len(TABLE)
    for row, (_, start) in zip(rows, TABLE, strict=True):
        assert row.startswith(start) and len(row) <= WIDTH


@pytest.mark.parametrize("more", [0, 1])
def test_the_first_losses_are_listed_and_the_others_counted(more):
    said = before_the_table(of([CAPPED], clients=50, losses=[loss(f"c{n:02}") for n in range(LISTED + more)]))
    assert sum("could use" in line for line in said) == 20
    assert [line for line in said if line.startswith("and ")] == ["and 1 more: --json lists all"] * more
    assert not any("None of the" in line for line in said)


def test_names_are_cut_and_counted_and_lines_end_at_80_characters():
    apis = [CAPPED._replace(key=n, name=f"{n}{'x' * 30}") for n in range(9)]
    shown = list(lines(of(apis)))
    assert "8xxx" not in " ".join(shown[: shown.index(HEAD)]) and " and 1 more" in " ".join(shown[:10])
    assert all(row.startswith(f"{n}{'x' * 27} ") for n, row in enumerate(shown[shown.index(HEAD) + 1 :]))
    word = "y" * 100
    for words, expected in ((49, 80), (50, 30)):
        said = list(lines(of(brokers=[one_broker("z" * words), one_broker(word)])))
        assert len(next(line for line in said if line.startswith("not asked"))) == expected
        assert f"  {word}" in said
