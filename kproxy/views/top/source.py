"""Requests the figures of `kproxy top` from the admin port: /api/live always, the rest only while it is shown.

Duty: one call per refresh, in the thread of the caller; each answer replaces `figures`, which never change. Bounded:
MAX_CONNECTIONS rows, PAGES pages of groups; findings are requested every FINDINGS_S, more than MANY connections every
CONNECTIONS_S. Failed requests raise KproxyError.
"""

from time import monotonic
from typing import Any

from kproxy.admin.asking import AdminPort
from kproxy.errors import KproxyError
from kproxy.views.top.figures import Figures, Row

MAX_CONNECTIONS = 2000
MANY = 200  # connections; listing so many costs a kproxy 1 ms
CONNECTIONS_S = 5.0
FINDINGS_S = 10.0
_GROUPS_PAGE = 1000
_PAGES = 20


class Source:
    """The answers of one kproxy. port: its admin port."""

    def __init__(self, port: AdminPort) -> None:
        self.port = port
        self.figures = Figures()
        self.restarts = 0
        self._known = {"after": 0, "series": 0, "groups": 0}  # positions in the page's history
        self._connections: list[Row] = []
        self._connections_at = -CONNECTIONS_S
        self._findings: list[Row] = []
        self._findings_at = -FINDINGS_S

    @property
    def url(self) -> str:
        return self.port.url

    def ask(self) -> float:
        """Request the next answer; returns the seconds until there is a new one."""
        answer = self.port.get("/api/live", slow_after=self.figures.slow_after_us, **self._known)
        try:
            self._remember(answer)
            figures = self.figures.copy()  # the thread that draws may be reading the others
            restarted = figures.add(answer)
            self.figures = figures
            if restarted:
                self.restarts += 1
                self._connections = []
                self._findings_at = -FINDINGS_S
            return float(answer["interval_s"])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise KproxyError(f"{self.url} is no kproxy of this kind: /api/live answers something else") from None

    def _remember(self, answer: Any) -> None:
        """Record the positions in the history that need not be sent again."""
        if answer.get("samples"):
            self._known["after"] = int(answer["samples"][-1]["n"])
        if "series" in answer:
            self._known["series"] = answer["first_series"] + len(answer["series"])
            self._known["groups"] = answer["first_group"] + len(answer["group_names"])

    def connections(self, client_id: str | None = None) -> list[Row]:
        """Return the oldest MAX_CONNECTIONS connections, or those of them with a client id."""
        is_old = monotonic() - self._connections_at >= CONNECTIONS_S
        if is_old or len(self._connections) <= MANY:
            self._connections = self._rows("/api/connections", limit=MAX_CONNECTIONS)
            self._connections_at = monotonic()
        rows = self._connections
        now_ns = self.figures.state["now_ms"] * 1_000_000
        for row in rows:
            row["age_s"] = max(0.0, (now_ns - int(row["opened_ns"])) / 1e9) if "opened_ns" in row else None
        return [row for row in rows if client_id is None or (row.get("client_id") or "") == client_id]

    def requests(self, connection: int) -> list[Row]:
        """Return the requests in flight on a connection."""
        return self._rows("/api/requests", connection=connection)

    def members(self, cluster: str, group: str) -> list[Row]:
        """Return the members of a group. Raises KproxyError if the group is unknown, or not known any more."""
        after = ""
        for _ in range(_PAGES):
            page = self._rows("/api/groups", limit=_GROUPS_PAGE, after=after)
            for row in page:
                if (row["cluster"], row["group"]) == (cluster, group):
                    return [dict(member) for member in row["members"]]
            if len(page) < _GROUPS_PAGE:
                break
            after = f"{page[-1]['cluster']}/{page[-1]['group']}"
        raise KproxyError("no member of this group is known: none joined since kproxy began, or the group is gone")

    def findings(self) -> list[Row]:
        """Return the findings, requested every FINDINGS_S. Raises KproxyError if this kproxy has none."""
        if monotonic() - self._findings_at >= FINDINGS_S:
            try:
                answer = self.port.get("/api/findings")
            except KproxyError as fault:
                if "no such value" not in str(fault):
                    raise
                raise KproxyError("this kproxy looks for no findings: kproxy run and kproxy watch do") from None
            listed = answer.get("findings", ()) if isinstance(answer, dict) else answer
            self._findings = [dict(row) for row in listed]
            self._findings_at = monotonic()
        return self._findings

    def _rows(self, path: str, **parameters: Any) -> list[Row]:
        answer = self.port.get(path, **parameters)
        if not isinstance(answer, list):
            raise KproxyError(f"{self.url}{path} answers no list")
        return [dict(row) for row in answer]
