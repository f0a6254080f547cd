"""Views over the tables: each row joined with columns of other tables, in SQL that both DuckDB and Spark run.

`exchanges_full` adds the client's software and login to an exchange; `partitions_full` and `batches_full` add
these, the client, the broker and the outcome to a partition or a batch.
"""

from kproxy.tables import schema

_OF_EXCHANGE = (
    *("client_id", "client_address", "client_port", "broker_address", "broker_port", "broker_id", "api_version"),
    *("request_start_ns", "response_end_ns", "latency_ns", "outcome", "acks", "transactional_id"),
)
_OF_CONNECTION = ("software_name", "software_version", "sasl_mechanism", "tls")


def _full(table: schema.Table) -> str:
    beside = ""
    joined = "t.source = c.source and t.connection = c.connection"
    exchanges = ""
    if table is not schema.EXCHANGES:
        beside = "".join(f", e.{name}" for name in _OF_EXCHANGE)
        same = " and ".join(f"t.{key} = e.{key}" for key in ("source", "connection", "`number`"))
        exchanges = f" left join exchanges e on {same}"
    beside += "".join(f", c.{name}" for name in _OF_CONNECTION)
    return f"select t.*{beside} from {table.name} t{exchanges} left join connections c on {joined}"


# The SQL texts by name, and the tables that each view needs.
VIEWS = {f"{table.name}_full": _full(table) for table in (schema.EXCHANGES, schema.PARTITIONS, schema.BATCHES)}
NEEDED = {name: (name.removesuffix("_full"), "exchanges", "connections") for name in VIEWS}
