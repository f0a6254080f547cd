"""Rows of the tables of `kproxy top` from answers of /api/live: counters so far, and rates of the last seconds.

Duty: subtracts and sums; a rate is over the last WINDOW_S, a quantile is that of /metrics
(`metrics.counters.bounds.quantile`). Bounded: answers of WINDOW_S, MAX_ANSWERS of them, MAX_SLOW slow exchanges.
docs/admin.md defines the format of an answer.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kproxy.metrics.counters.bounds import quantile

WINDOW_S = 10.0
MAX_ANSWERS = 64
MAX_SLOW = 200

_NO_LAG = {"max_lag_records": None, "lag_unknown_partitions": 0}

Answer = Mapping[str, Any]
Row = dict[str, Any]

_COUNTS = ("requests", "errors", "request_bytes", "response_bytes", "throttled", "throttle_ms")
_RATES = ("requests", "errors", "request_bytes", "response_bytes")
_HISTOGRAMS = (6, 7)  # indices in a row's values: histograms of the broker's time, and of the client's whole wait
_QUANTILES = (("p50_s", 0, 0.5), ("p99_s", 0, 0.99), ("wait_p99_s", 1, 0.99))  # name, index in _HISTOGRAMS, rank
_TOPIC = ("produced_bytes", "produced_records", "fetched_bytes", "fetched_records")
_GROUP = ("state", "members", "generation", "rebalances", "rebalance_s", "refused", "protocol", "type")
_FULL = {100, 200}  # rows of a list of /api/live that was cut
_OTHER = "other"  # the sum of consumers without a name of their own
_LATE_US = 30 * 10**6  # a slow exchange is listed at the end of its answer, with the time of its first byte
_WAITING = {"Fetch", "ShareFetch", "JoinGroup", "SyncGroup", "ConsumerGroupHeartbeat"}  # they wait on purpose


class AtLeast(int):
    """A lower bound of a number of records: the lag of some partitions is unknown."""


class Figures:
    """Figures from the answers of the window; empty before the first answer."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque(maxlen=MAX_ANSWERS)
        self._slow: deque[Row] = deque(maxlen=MAX_SLOW)
        self._lags: Sequence[Sequence[Any]] = ()

    def copy(self) -> "Figures":
        """Return figures with the same answers, to which others can be added while a thread reads these."""
        figures = Figures()
        figures._answers.extend(self._answers)
        figures._slow.extend(self._slow)
        figures._lags = self._lags
        return figures

    def add(self, answer: Answer) -> bool:
        """Add an answer; returns whether another process gave it, in which case earlier answers are dropped."""
        restarted = False
        if self._answers:
            started, now = (each["state"]["started_ms"] for each in (self._answers[-1], answer))
            if started != now:
                restarted = True
                self._answers.clear()
                self._slow.clear()
                self._lags = ()
            elif answer["state"]["now_ms"] == self._answers[-1]["state"]["now_ms"]:
                self._answers.pop()  # the same answer again
        self._answers.append(answer)
        while len(self._answers) > 2 and self._span_s(1) >= WINDOW_S:
            self._answers.popleft()
        self._lags = answer.get("lags", self._lags)
        known = {(row["connection"], row["number"], row["at_us"]) for row in self._slow}
        for values in answer["slow"]:
            row = dict(zip(answer["slow_columns"], values, strict=False))
            if (row["connection"], row["number"], row["at_us"]) not in known:
                self._slow.append(row)
        return restarted

    @property
    def is_empty(self) -> bool:
        return not self._answers

    @property
    def slow_after_us(self) -> int:
        """Return the time from which slow exchanges are requested: _LATE_US before the newest known one."""
        return max(0, max((row["at_us"] for row in self._slow), default=0) - _LATE_US)

    @property
    def seconds(self) -> float:
        """Return the seconds that rates cover; 0 after one answer."""
        return self._span_s(0)

    def _span_s(self, first: int) -> float:
        return float(self._answers[-1]["state"]["now_ms"] - self._answers[first]["state"]["now_ms"]) / 1000

    @property
    def state(self) -> Row:
        return dict(self._answers[-1]["state"])

    def head(self) -> Row:
        """Return the figures of the whole process in one row."""
        first, last = self._answers[0]["state"], self._answers[-1]["state"]
        (row,) = self.traffic((), lambda row: row[2] not in _WAITING, of="apis") or [self._empty()]
        (everything,) = self.traffic((), of="apis") or [self._empty()]
        everything |= {name: row[name] for name in ("p50_s", "p99_s", "wait_p99_s")}
        everything["connections"] = last["connections"]
        everything["cpu_share"] = max(0.0, last["cpu_s"] - first["cpu_s"]) / self.seconds if self.seconds else None
        current = self._answers[-1].get("current")  # present with the page's history
        everything["inside_p99_s"] = current["p"][0] if current else None
        everything["uptime_s"] = (last["now_ms"] - last["started_ms"]) / 1000
        return everything

    def traffic(
        self,
        by: tuple[str, ...] = ("cluster", "api"),
        which: Callable[[Sequence[Any]], bool] = lambda row: True,
        of: str = "totals",
    ) -> list[Row]:
        """Return requests, latencies, errors and bytes, summed by columns of cluster, broker and api.

        of: the list to sum. `totals` may be cut to its largest rows; `apis` (without brokers) and `of_brokers` (without
        APIs) are complete.
        """
        names = ("cluster", "broker", "api")
        bounds = [round(bound * 1e9) for bound in self._answers[-1]["bounds_s"]]
        sums: dict[tuple[Any, ...], Row] = {}
        histograms: dict[tuple[Any, ...], tuple[list[int], list[int]]] = {}
        for key, now, before in self._pairs(of if of in self._answers[-1] else "totals", 3):
            if not which(key):
                continue
            named = dict(zip(names, key, strict=True))
            wanted = tuple(named[name] for name in by)
            if wanted not in sums:
                sums[wanted] = dict(zip(by, wanted, strict=True)) | self._empty()
                histograms[wanted] = [0] * (len(bounds) + 1), [0] * (len(bounds) + 1)
            row = sums[wanted]
            for index, name in enumerate(_COUNTS):
                row[name] += now[index]
                if name in _RATES:
                    row[f"{name}_per_s"] += self._rate(now[index], before[index] if before else 0)
            for counts, place in zip(histograms[wanted], _HISTOGRAMS, strict=True):
                for sign, histogram in ((1, now[place:]), (-1, before[place:] if before else ())):
                    pairs = histogram[0] if histogram else ()  # an older kproxy sends no histogram of whole waits
                    for bucket, count in zip(pairs[::2], pairs[1::2], strict=True):
                        if bucket < len(counts):
                            counts[bucket] += sign * count
        recent = self._recent(by, which, of)
        for wanted, row in sums.items():
            row["recent_requests_per_s"] = recent.get(wanted, [])
            for name, which_one, q in _QUANTILES:
                counts = histograms[wanted][which_one]
                found = quantile(bounds, [max(0, count) for count in counts], q) if self.seconds else None
                row[name] = None if found is None else found / 1e9
        return list(sums.values())

    def _recent(
        self, by: tuple[str, ...], which: Callable[[Sequence[Any]], bool], of: str
    ) -> dict[tuple[Any, ...], list[float]]:
        """Return requests per second between successive answers of the window, the oldest first."""
        places = [("cluster", "broker", "api").index(name) for name in by]
        rates: dict[tuple[Any, ...], list[float]] = {}
        before: dict[tuple[Any, ...], int] = {}
        for number, answer in enumerate(self._answers):
            sums: dict[tuple[Any, ...], int] = {}
            for row in answer[of] if of in answer else answer["totals"]:
                if which(row[:3]):
                    wanted = tuple(row[place] for place in places)
                    sums[wanted] = sums.get(wanted, 0) + row[3]
            if number:
                earlier = self._answers[number - 1]
                seconds = (answer["state"]["now_ms"] - earlier["state"]["now_ms"]) / 1000
                for wanted, count in sums.items():
                    added = max(0, count - before[wanted]) if wanted in before else 0
                    rates.setdefault(wanted, [0.0] * (number - 1)).append(added / seconds)
            before = sums
        return rates

    def brokers(self) -> list[Row]:
        """Return traffic by broker, with connections and requests in flight."""
        rows = {(row["cluster"], row["broker"]): row for row in self.traffic(("cluster", "broker"), of="of_brokers")}
        for cluster, broker, connections, in_flight, disconnects in self._answers[-1]["brokers"]:
            row = rows.setdefault((cluster, broker), {"cluster": cluster, "broker": broker} | self._empty())
            row |= {"connections": connections, "in_flight": in_flight, "disconnects": disconnects}
        return list(rows.values())

    def topics(self) -> list[Row]:
        """Return written and read bytes and records by topic, with the largest lag of a consumer.

        Includes topics with only a known lag: they have no traffic, or too little for a list that was cut.
        """
        lags = self._largest_lags(lambda lag: lag["topic"])
        rows = []
        for (cluster, topic), now, before in self._pairs("topics", 2):
            row: Row = {"cluster": cluster, "topic": topic} | dict(zip(_TOPIC, now, strict=False))
            for index, name in enumerate(_TOPIC):
                row[f"{name}_per_s"] = self._rate(now[index], before[index] if before else 0)
            rows.append(row | lags.pop((cluster, topic), _NO_LAG))
        idle = dict.fromkeys((*_TOPIC, *(f"{name}_per_s" for name in _TOPIC)))
        return rows + [{"cluster": cluster, "topic": topic} | idle | lag for (cluster, topic), lag in lags.items()]

    def is_cut(self, name: str) -> bool:
        """Return whether a list of the last answer (`lags` or another) has only its largest rows."""
        return len(self._lags if name == "lags" else self._answers[-1][name]) in _FULL

    def _largest_lags(self, of: Callable[[Row], str | None]) -> dict[tuple[str, str], Row]:
        """Return the largest lag of a consumer, and unknown partitions, by (cluster, name that `of` returns)."""
        found: dict[tuple[str, str], Row] = {}
        for lag in self.lags():
            name = of(lag)
            is_sum = lag["consumer"] == lag["topic"] == _OTHER and self.is_cut("lags")  # the sum of rows that were cut
            if name is None or is_sum:
                continue
            most = found.setdefault((lag["cluster"], name), dict(_NO_LAG))
            if lag["lag_records"] is not None:
                most["max_lag_records"] = max(lag["lag_records"], most["max_lag_records"] or 0)
            most["lag_unknown_partitions"] += lag["lag_unknown_partitions"]
        for most in found.values():
            if most["max_lag_records"] is not None and most["lag_unknown_partitions"]:
                most["max_lag_records"] = AtLeast(most["max_lag_records"])
        return found

    def clients(self) -> list[Row]:
        names = ("cluster", "client_id", "software", "version", "connections")
        return [dict(zip(names, row, strict=False)) for row in self._answers[-1]["clients"]]

    def groups(self) -> list[Row]:
        """Return consumer groups, with their largest lag of a topic.

        Includes groups with only a known lag: no member has joined since this kproxy started, or ever.
        """
        lags = self._largest_lags(lambda lag: lag["consumer"] if lag["consumer_is"] == "group" else None)
        rows: list[Row] = [
            {"cluster": row[0], "group": row[1]}
            | dict(zip(_GROUP, row[2:], strict=False))
            | lags.pop((row[0], row[1]), _NO_LAG)
            for row in self._answers[-1]["groups"]
        ]
        unseen = dict.fromkeys(_GROUP)
        return rows + [{"cluster": cluster, "group": group} | unseen | lag for (cluster, group), lag in lags.items()]

    def lags(self, cluster: str | None = None, topic: str | None = None) -> list[Row]:
        """Return the lags of all consumers, or of the consumers of a topic."""
        names = ("cluster", "consumer_is", "consumer", "topic", "lag_records", "lag_s", "lag_unknown_partitions")
        rows: list[Row] = []
        for lag in self._lags:
            row = dict(zip(names, (*lag, 0), strict=False))  # older versions omit the last column
            if row["lag_unknown_partitions"] and row["lag_records"] is not None:
                row["lag_records"] = AtLeast(row["lag_records"])
            rows.append(row)
        return [row for row in rows if topic is None or (row["cluster"], row["topic"]) == (cluster, topic)]

    def errors(self) -> list[Row]:
        return [
            dict(zip(("cluster", "broker", "api", "error"), key, strict=True))
            | {"answers": now[0], "answers_per_s": self._rate(now[0], before[0] if before else 0)}
            for key, now, before in self._pairs("errors", 4)
        ]

    def slow(self) -> list[Row]:
        """Return the slow exchanges, the newest first."""
        return list(reversed(self._slow))

    def _empty(self) -> Row:
        return {
            **dict.fromkeys(_COUNTS, 0),
            **{f"{name}_per_s": 0.0 for name in _RATES},
            **{name: None for name, *_ in _QUANTILES},
            "recent_requests_per_s": [],
        }

    def _rate(self, now: int, before: int) -> float:
        return max(0, now - before) / self.seconds if self.seconds else 0.0

    def _pairs(self, name: str, key_length: int) -> list[tuple[tuple[Any, ...], Sequence[Any], Sequence[Any] | None]]:
        """Return (key, values now, values at the start of the window) of each row; None for a new row.

        A row that is new in a cut list may be old, so it has no rate for one window.
        """
        first = self._answers[0]
        listed = first[name] if name in first else self._summed(first["totals"], name)
        earlier = {tuple(row[:key_length]): row[key_length:] for row in listed}
        was_cut = len(listed) in _FULL and (name != "totals" or "apis" in first)
        pairs = []
        for row in self._answers[-1][name]:
            key, now = tuple(row[:key_length]), row[key_length:]
            pairs.append((key, now, earlier.get(key, now if was_cut else None)))
        return pairs

    @staticmethod
    def _summed(totals: Sequence[Sequence[Any]], name: str) -> list[list[Any]]:
        """Return `apis` or `of_brokers`, summed from complete totals."""
        sums: dict[tuple[Any, ...], list[Any]] = {}
        for cluster, broker, api, *values in totals:
            key = (cluster, "", api) if name == "apis" else (cluster, broker, "")
            known = sums.setdefault(key, [*key, *([0] * len(_COUNTS)), *([] for _ in values[len(_COUNTS) :])])
            for index, value in enumerate(values, 3):
                known[index] = known[index] + value  # a bucket may come twice in a list: counts are added up anyway
        return list(sums.values())
