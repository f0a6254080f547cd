"""Questions about one exchange: why it took its time, and what stood before it. Refuses to know frames."""

from collections.abc import Mapping

from kproxy.analysis import timing
from kproxy.analysis.engine import Frame, ask


def explained(tables: Mapping[str, Frame], connection: int, number: int) -> Frame:
    """The row of `slow` about an exchange, however short it was; none if its answer was lost, or none is expected."""
    mine = {
        name: ask({"t": tables[name]}, some=f"select * from t where connection = {int(connection)}")
        for name in ("exchanges", "connections")
    }
    return ask(
        {"answer": timing.each(mine["exchanges"], mine["connections"])},
        one=f"select * from answer where `number` = {int(number)}",
    )


def before(tables: Mapping[str, Frame], connection: int, number: int, count: int) -> Frame:
    """The exchanges before one on its connection, and it: what they waited for, and whether they still did."""
    return ask(
        {"exchanges": tables["exchanges"]},
        mine=f"select * from exchanges where connection = {int(connection)}",
        asked=f"select max(request_end_ns) as asked_ns from mine where `number` = {int(number)}",
        answer=f"""
            select `number`, `time`, api, total_ns, queue_ns, muted_ns, throttle_ms, outcome, error,
                response_end_ns is null or response_end_ns > asked_ns as in_flight
            from mine cross join asked
            where `number` >= {int(number) - int(count)} and `number` <= {int(number)}
            order by `number`""",
    )
