"""Questions about one exchange: where its time went, and the exchanges before it. Refuses to know frames."""

from collections.abc import Mapping

from kproxy.analysis.engine import Frame, ask
from kproxy.analysis.questions import timing
from kproxy.analysis.questions.pieces import literal


def _of(connection: int, source: str | None) -> str:
    """A condition on rows of `t`: those of a connection. source None: the first source that has it."""
    own = f"connection = {int(connection)}"
    one = f"(select min(source) from t where {own})" if source is None else literal(source)
    return f"{own} and source = {one}"


def explained(tables: Mapping[str, Frame], connection: int, number: int) -> Frame:
    """The row of `slow` about an exchange, however short it was; none if its answer was lost, or none is expected.

    If several sources have the connection, as overlapping captures do, it is the first one's.
    """
    mine = ask({"t": tables["exchanges"]}, some=f"select * from t where {_of(connection, None)}")
    return ask(
        {"answer": timing.each(mine, tables["connections"])},  # the last packet of any connection ends the capture
        one=f"select * from answer where `number` = {int(number)}",
    )


def before(tables: Mapping[str, Frame], connection: int, number: int, count: int, source: str | None = None) -> Frame:
    """An exchange and those before it on its connection: their causes, and whether they were still in flight."""
    return ask(
        {"t": tables["exchanges"]},
        mine=f"select * from t where {_of(connection, source)}",
        asked=f"select max(request_end_ns) as asked_ns from mine where `number` = {int(number)}",
        answer=f"""
            select `number`, `time`, api, total_ns, queue_ns, muted_ns, throttle_ms, outcome, error,
                response_end_ns is null or response_end_ns > asked_ns as in_flight
            from mine cross join asked
            where `number` >= {int(number) - int(count)} and `number` <= {int(number)}
            order by `number`""",
    )
