"""An overview of tables, section by section, for readers who do not know yet what to ask.

Duty: a frame for each section, of the same texts as the jobs, and the commands to go on with. Brokers' own requests
count in `span` and `brokers` only. Refuses to know engines and how it is shown.
"""

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kproxy.analysis import engine
from kproxy.analysis.engine import Frame, ask, first_rows
from kproxy.analysis.findings.given_up import FAILED_MOST, RETRIED_US, attempts
from kproxy.analysis.questions import knowledge, parties, timing
from kproxy.analysis.questions.pieces import (
    ALL_BYTES,
    CONNECTIONS,
    GROUPS,
    KEYS,
    KNOWN_BROKERS,
    SOFTWARE,
    TOPIC,
    keyed,
    literal,
    missed_answers,
    of_clients,
    percentiles,
    without_brokers,
)
from kproxy.analysis.questions.registry import registry

# Exchanges with `missed` for those whose client missed the answer: see `missed_answers`.
_UNANSWERED = {
    **missed_answers(),
    "marked": f"""
        select e.*, m.is_missed as missed from exchanges e left join
            (select distinct {", ".join(KEYS)}, 1 as is_missed from missed) m
            on {" and ".join(f"e.{key} = m.{key}" for key in KEYS)}""",
}
TABLES = (
    *("exchanges", "partitions", "batches", "connections", "quality", "group_events", "rebalances", "leadership"),
    "registry",
)
Tables = Mapping[str, Frame]


def span(tables: Tables) -> Frame:
    """Time of the first and the last request, and totals. Without times (`no_times`) requests are of the epoch."""
    us = "unix_micros(`time`)"
    return ask(
        {"exchanges": tables["exchanges"]},
        answer=f"""
            select coalesce(min(case when {us} > 0 then `time` end), min(`time`)) as first, max(`time`) as last,
                (max({us}) - coalesce(min(case when {us} > 0 then {us} end), min({us}))) * 1000 as lasted_ns,
                count(*) as exchanges, sum({ALL_BYTES}) as bytes, {CONNECTIONS} as connections,
                count(distinct source) as sources, count(distinct cluster) as clusters
            from exchanges""",
    )


def brokers(tables: Tables) -> Frame:
    """Brokers, each with all its listeners: requests, errors, bytes, p99 latency of answered requests.

    `broker` is the address with the most exchanges, `listeners` are all addresses.
    """
    return ask(
        {"exchanges": tables["exchanges"], "connections": tables["connections"]},
        **_UNANSWERED,
        known=KNOWN_BROKERS,
        of_brokers=keyed("marked"),
        listened=f"""
            select cluster, broker_key, {GROUPS["broker"]} as broker, count(*) as exchanges from of_brokers
            group by cluster, broker_key, {GROUPS["broker"]}""",
        listening="""
            select cluster, broker_key, max_by(broker, named_struct('n', exchanges, 'b', broker)) as broker,
                array_join(array_sort(collect_list(broker)), ', ') as listeners
            from listened group by cluster, broker_key""",
        counted=f"""
            select cluster, broker_key, max(known_id) as broker_id, count(*) as exchanges,
                count_if(errors > 0) as errors, count(missed) as unanswered,
                sum(request_bytes) as request_bytes, sum(response_bytes) as response_bytes,
                {percentiles("latency_ns", "", 0.99)}
            from of_brokers group by cluster, broker_key""",
        answer="""
            select c.cluster, l.broker, c.broker_id, l.listeners, c.exchanges, c.errors, c.unanswered, c.request_bytes,
                c.response_bytes, c.p99_ns
            from counted c join listening l on c.cluster is not distinct from l.cluster and c.broker_key = l.broker_key
            order by c.exchanges desc, c.cluster, l.broker""",
    )


def clients(tables: Tables) -> Frame:
    """Clients, with the name and version of their software where they send it (ApiVersions v3 and newer)."""
    return ask(
        {"exchanges": tables["exchanges"], "connections": tables["connections"]},
        software=SOFTWARE,
        **_UNANSWERED,
        # By connection first: so few rows are joined.
        each_one=f"""
            select source, connection, {GROUPS["client"]} as client, client_address, count(*) as exchanges,
                count_if(errors > 0) as errors, count(missed) as unanswered, sum({ALL_BYTES}) as bytes
            from marked where {of_clients(False)}
            group by source, connection, {GROUPS["client"]}, client_address""",
        answer="""
            select client, nullif(s.software, '') as software, count(distinct client_address) as hosts,
                sum(exchanges) as exchanges, sum(errors) as errors, sum(unanswered) as unanswered, sum(bytes) as bytes
            from each_one e left join software s on e.source = s.source and e.connection = s.connection
            group by client, nullif(s.software, '')
            order by exchanges desc, client, software""",
    )


def apis(tables: Tables) -> Frame:
    """Requests of clients by API: errors, unanswered requests, latency of answered ones."""
    return ask(
        {"exchanges": tables["exchanges"], "connections": tables["connections"]},
        **_UNANSWERED,
        answer=f"""
            select api, count(*) as exchanges, count_if(errors > 0) as errors, count(missed) as unanswered,
                {percentiles("latency_ns", "", 0.5, 0.99)}, max(latency_ns) as max_ns,
                count_if(throttle_ms > 0) as throttled, sum({ALL_BYTES}) as bytes
            from marked where {of_clients(False)}
            group by api order by exchanges desc, api""",
    )


def topics(tables: Tables) -> Frame:
    """Bytes and records of each topic, written and read; written are those acknowledged, or sent with acks=0.

    failed_attempts: batches in Produce requests that were refused or got no response; each retry counts. lost_batches:
    the failed batches whose first record is in no later successful request of the client; a batch without a response
    may still be in the log. Requests in flight at the end of the capture have not failed; nor is a batch lost if its
    client may still retry it then. Null for a topic with too many failed attempts to look for each, or with batches
    that have no timestamp.
    """
    same = " and ".join(f"o.{key} = {{0}}.{key}" for key in KEYS)
    is_write = "api = 'Produce' and direction = 'request'"
    of_log = "{0}.cluster is not distinct from {1}.cluster and {0}.client is not distinct from {1}.client"
    of_log += " and {0}.topic = {1}.topic and {0}.`partition` = {1}.`partition`"
    return ask(
        {name: tables[name] for name in ("partitions", "exchanges", "batches", "connections")},
        once=("failed",),
        moved="""
            select * from partitions where api in ('Produce', 'Fetch', 'ShareFetch') or direction = 'request'""",
        ours=without_brokers("moved"),
        **attempts(),
        outcomes=f"""
            select o.*, coalesce(is_refused, not u.waits, false) as has_failed, coalesce(u.waits, false) as waits
            from ours o
            left join refused r on {same.format("r")} and {is_write} and r.of_topic = {TOPIC}
                and r.of_partition = o.`partition`
            left join unanswered u on {same.format("u")} and {is_write}""",
        ends="select cluster, max(unix_micros(`time`)) as end_us from exchanges group by cluster",
        good="""
            select cluster, client, topic, `partition`, max(us) as good_us from written
            group by cluster, client, topic, `partition`""",
        lost=f"""
            select a.cluster, a.topic, true as has_failed, case when count(base_timestamp) = count(*) then count_if(
                    written_us is null and (is_retried = 0 or tried_us < good_us or tried_us < end_us - {RETRIED_US}))
                end as lost_batches
            from ended a left join good g on {of_log.format("a", "g")}
            join ends e on a.cluster is not distinct from e.cluster
            group by a.cluster, a.topic""",
        many=f"""
            select distinct topic, true as is_many from (
                select topic from failed group by topic, `partition` having count(*) > {FAILED_MOST}) f""",
        counted=f"""
            select cluster, {TOPIC} as topic, max(`partition`) + 1 as partitions,
                sum(case when {is_write} and not has_failed and not waits then bytes end) as written_bytes,
                sum(case when {is_write} and not has_failed and not waits then records end) as written_records,
                count_if({is_write} and has_failed) as failed_attempts,
                sum(case when api in ('Fetch', 'ShareFetch') and direction = 'response' then bytes end) as read_bytes,
                sum(case when api in ('Fetch', 'ShareFetch') and direction = 'response' then records end)
                    as read_records
            from outcomes group by cluster, {TOPIC}""",
        answer="""
            select c.cluster, c.topic, partitions, written_bytes, written_records, failed_attempts,
                case when m.is_many is null then case when l.has_failed then l.lost_batches else 0 end end
                    as lost_batches, read_bytes,
                read_records
            from counted c left join lost l on c.cluster is not distinct from l.cluster and c.topic = l.topic
            left join many m on c.topic = m.topic
            order by coalesce(written_bytes, 0) + coalesce(read_bytes, 0) desc, c.cluster, c.topic""",
    )


def errors(tables: Tables) -> Frame:
    """Errors in answers, and requests without an answer."""
    return parties.errors(tables["exchanges"], tables["partitions"], tables["connections"])


def throttles(tables: Tables) -> Frame:
    """Clients that brokers throttled, by API."""
    return parties.throttle(tables["exchanges"])


def slowest(tables: Tables) -> Frame:
    """The slowest requests, without long polls: one row for each cause and API, the slowest.

    A throttle counts by client, whichever broker reported it; time in a broker counts by broker, other causes by both.
    """
    answer = timing.slow(tables["exchanges"], tables["connections"])
    chosen = "`time`, total_ns, cause, api, client, broker, explanation, exchanges, head, source, connection, `number`"
    same = """partition by cause, api, case when cause not in ('broker', 'queue') then client end,
        case when cause != 'throttle' then broker end"""
    longest = "total_ns desc, `time`, connection, `number`, source"
    return ask(
        {"answer": answer},
        gathered=f"""
            select *, row_number() over ({same} order by {longest}) as place, sum(exchanges) over ({same}) as alike
            from answer where cause != 'long_poll'""",
        some=f"""
            select {chosen.replace("exchanges", "cast(alike as bigint) as exchanges")}
            from gathered where place = 1 order by {longest}""",
    )


def groups(tables: Tables) -> Frame:
    """Groups: members, rebalances, expired sessions, failed commits; the most rebalances first."""
    answer = knowledge.groups(tables["group_events"], tables["rebalances"])
    chosen = "cluster, group_id, members, rebalances, worst_cause, rebalancing_ns, longest_ns, expired, commits_failed"
    return ask({"answer": answer}, some=f"select {chosen} from answer")


def coordinators(tables: Tables) -> Frame:
    """Groups whose coordinator was unavailable for a while, the longest outage first."""
    answer = knowledge.coordinators(
        *(tables[name] for name in ("group_events", "rebalances", "exchanges", "connections"))
    )
    chosen = "`time`, cluster, group_id, outage_ns, former_id, coordinator_id, happened"
    return ask({"answer": answer}, some=f"select {chosen} from answer where outage_ns is not null")


def leaders(tables: Tables) -> Frame:
    """Topics whose leaders or in-sync replicas changed, those with offline partitions first."""
    answer = knowledge.leadership(tables["leadership"])
    return ask(
        {"partitions": answer},
        counted="""
            select cluster, topic, count(*) as partitions, sum(elections) as elections, sum(shrunk) as shrunk,
                sum(grown) as grown, sum(moved) as moved, sum(offline) as offline,
                max(offline_ns) as longest_offline_ns, count_if(out_of_sync > 0) as out_of_sync
            from partitions group by cluster, topic""",
        answer="""
            select * from counted order by offline desc, elections + shrunk desc, cluster nulls first, topic""",
    )


def zookeeper(tables: Tables) -> Frame:
    """Requests to ZooKeeper by the kind of node."""
    return ask(
        {"registry": tables["registry"]},
        answer="""
            select cluster, kind, count(*) as operations, count(distinct session) as sessions,
                count_if(error is not null) as errors, max(latency_ns) as max_ns
            from registry group by cluster, kind
            order by operations desc, cluster nulls first, kind nulls first""",
    )


def quality(tables: Tables) -> Frame:
    """Gaps and other flaws of the captures that limit the tables."""
    return ask(
        {"quality": parties.quality(tables["quality"])},
        answer="select source, kind, `count`, bytes, sentence from quality order by source, kind",
    )


SECTIONS: dict[str, tuple[Callable[[Tables], Frame], int]] = {  # how many rows of each are shown
    "span": (span, 1),
    "brokers": (brokers, 10),
    "clients": (clients, 10),
    "apis": (apis, 12),
    "topics": (topics, 10),
    "errors": (errors, 5),
    "throttles": (throttles, 5),
    "slowest": (slowest, 5),
    "groups": (groups, 10),
    "coordinators": (coordinators, 5),
    "leaders": (leaders, 5),
    "zookeeper": (zookeeper, 10),
    "quality": (quality, 20),
}


# The number of rows per section that `kproxy convert` prints at its end.
BRIEF = {
    "span": 1,
    "brokers": 4,
    "clients": 4,
    "topics": 3,
    "apis": 4,
    "errors": 4,
    "throttles": 2,
    "slowest": 1,
    "groups": 3,
    "coordinators": 1,
    "leaders": 3,
    "zookeeper": 3,
}


def overview(
    tables: Tables, rows: int | None = None, chosen: Mapping[str, int] | None = None
) -> dict[str, tuple[Frame, int]]:
    """The sections, each with how many rows of it are worth a look; `rows`: as many of each.

    chosen: only these sections, with as many rows of each. A frame has one row more where there are more.
    """
    named = {name: most for name, (_, most) in SECTIONS.items()} if chosen is None else chosen
    found = {name: (SECTIONS[name][0](tables), most if rows is None else rows) for name, most in named.items()}
    return {name: (first_rows(frame, most + 1), most) for name, (frame, most) in found.items()}


def of_sources(tables: Tables, sources: Collection[str]) -> dict[str, Frame]:
    """The tables of an overview with the rows of these sources alone."""
    listed = ", ".join(map(literal, sorted(sources)))
    text = f"select * from every_source where source in ({listed})"
    return {name: ask({"every_source": tables[name]}, some=text) for name in TABLES}


def next_questions(
    program: str, places: Sequence[str], found: Mapping[str, Sequence[Mapping[str, Any]]], tables: Tables
) -> list[str]:
    """The next commands to run, the most useful first, of those with an answer in the tables. found: the sections."""
    where = shlex.join(places)
    of_bodies = ask({"partitions": tables["partitions"]}, answer="select distinct api from partitions")
    bodies = {api for (api,) in engine.rows(of_bodies)}
    asked = []
    if found["slowest"]:
        asked.append(f"slow {where}")
    if any(row["error"] not in parties.NO_ERRORS for row in found["errors"]):
        asked.append(f"errors {where} --by api,error,client")
    if found["throttles"]:
        asked.append(f"throttle {where} --every '10 seconds'")
    if any(row["rebalances"] for row in found["groups"]):
        asked += [f"groups {where}", f"rebalances {where}"]
    if found["coordinators"]:
        asked.append(f"coordinators {where}")
    if found["leaders"]:
        asked.append(f"leadership {where}")
    if found["zookeeper"]:
        if any(engine.rows(first_rows(registry(tables["registry"]), 1))):
            asked.append(f"registry {where}")
        rounds = ask(
            {"rebalances": tables["rebalances"]}, rounds="select 1 from rebalances where protocol = 'zookeeper'"
        )
        if any(engine.rows(first_rows(rounds, 1))):
            asked.append(f"consumers {where}")
    names = {row["api"] for row in found["apis"]}
    if any(row["max_ns"] is not None for row in found["apis"]):
        asked.append(f"latency {where} --by api,broker")
    if "OffsetCommit" in bodies:
        asked.append(f"group-lag {where}")
    if "Produce" in bodies:
        asked += [f"batching {where}", f"skew {where}"]
    if "Fetch" in bodies:
        asked.append(f"lag {where}")
    if "Fetch" in names:
        asked.append(f"fetching {where}")
    if "OffsetCommit" in bodies:
        asked.append(f"offsets {where}")
    return [f"kproxy {program} {words}" for words in asked]
