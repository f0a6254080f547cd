"""The policy forwards the same requests as a second, naive evaluator, which reads decoded messages."""

import fnmatch
import ipaddress
import random
from collections import Counter
from typing import Any
from uuid import UUID

import pytest
from pydantic import ValidationError

from kproxy.protocol import codec
from kproxy.protocol.schema import schema
from kproxy.proxy.config.api_groups import GROUPS
from kproxy.proxy.filters.policy import (
    audit,
    authorizer,
    globs,
    pending,
    policy,
    resources,
    share_sessions,
    topic_names,
)
from kproxy.proxy.filters.policy.policy import Patterns, Policy
from kproxy.proxy.filters.policy.topic_names import TopicNames
from kproxy.wire.events import BROKER, CLIENT
from tests.documented import missing, size
from tests.protocol.messages import Layout, layouts
from tests.proxy.filters.policy.policies import IDS, Decided, cluster, random_body
from tests.wire import playbook
from tests.wire.playbook import sized

REQUESTS = [layout for layout in layouts() if layout.side == "request"]
KNOWN_IDS = {IDS[1]: "orders", IDS[2]: "secret-1"}

# --- the second evaluator: it finds resources by the names of fields --------------------------------------------------

TOPIC_KEYS = {"topic", "topicName"}
TOPIC_LISTS = {"topicNames", "subscribedTopicNames", "sourceTopics", "repartitionSinkTopics"}
NAMED_IN = {"topics", "topicData", "v3AndBelowTopics", "stateChangelogTopics", "repartitionSourceTopics"}
GROUP_LISTS = {"groups", "groupIds", "groupsNames"}
NO_ACCESS = {"forgottenTopicsData", "cursor", "topologyDescription", "copartitionGroups"}
# Requests for a right on the cluster, whatever they name.
OF_THE_CLUSTER = {"CreateAcls", "DeleteAcls"}
ALL_IF_NULL = {
    "Metadata": "topics",
    "OffsetFetch": "topics",
    "DescribeLogDirs": "topics",
    "ElectLeaders": "topicPartitions",
    "ListPartitionReassignments": "topics",
    "DescribeShareGroupOffsets": "topics",
}
# Brokers require a right on the cluster, whatever these requests name.
CLUSTER_ONLY = {
    *("AlterPartitionReassignments", "AlterReplicaLogDirs", "DescribeLogDirs", "DescribeQuorum", "ElectLeaders"),
    *("ListPartitionReassignments", "WriteTxnMarkers", *GROUPS["broker"]),
}
TOUCHES_ALL = {"ElectLeaders", "ConsumerGroupHeartbeat", "StreamsGroupHeartbeat"}
EXPRESSIONS = {"subscribedTopicRegex", "sourceTopicRegex"}  # the broker subscribes to all topics that match


def accesses(api: str, version: int, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """(kind, name) of each resource in a request; ("all", kind) and ("cluster", "") for access without a name."""
    if api in OF_THE_CLUSTER:
        return []
    found: list[tuple[str, Any]] = []
    if api == "FindCoordinator":
        for key in body.get("coordinatorKeys", [body.get("key")]):
            kind = {0: "group", 1: "transactional_id", 2: "share"}.get(body.get("keyType", 0), "cluster")
            found.append(
                ("group", ":".join(key.split(":")[:-2]) or key.split(":")[0]) if kind == "share" else (kind, key)
            )
        return [(kind, "" if kind == "cluster" else name) for kind, name in found]
    if "Configs" in api:
        for resource in body["resources"]:
            kind = {2: "topic", 32: "group"}.get(resource["resourceType"], "cluster")
            found.append((kind, resource["resourceName"] if kind != "cluster" else ""))
        return found

    def walk(value: Any, key: str) -> None:
        if isinstance(value, list):
            for inner in value:
                if isinstance(inner, str):
                    for lists, kind in ((TOPIC_LISTS, "topic"), (GROUP_LISTS, "group")):
                        found.extend([(kind, inner)] if key in lists else [])
                    found.extend([("transactional_id", inner)] if key == "transactionalIds" else [])
                else:
                    walk(inner, key)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if name in NO_ACCESS or (api == "ConsumerGroupHeartbeat" and name == "topicPartitions"):
                    continue
                if name in EXPRESSIONS:
                    found.extend([("all", "topic")] if any(inner or ()) else [])
                    continue
                if inner is None and name == ALL_IF_NULL.get(api):
                    found.append(("all", "topic"))
                if (inner is not None and (name in TOPIC_KEYS or (name == "name" and key in NAMED_IN))) or (
                    name == "topicId" and inner.int
                ):
                    found.append(("topic", inner))
                elif name == "groupId" and inner is not None:
                    found.append(("group", inner))
                elif name in ("transactionalId", "v3AndBelowTransactionalId") and inner is not None:
                    found.append(("transactional_id", inner))
                else:
                    walk(inner, name)

    walk(body, "")
    if (api == "Metadata" and version == 0 and not body["topics"]) or (
        api == "DescribeTopicPartitions" and not body["topics"]
    ):
        found.append(("all", "topic"))
    if api in ("ListGroups", "ListTransactions"):
        found.append(("all", "group" if api == "ListGroups" else "transactional_id"))
    return found


def only_brokers_send(api: str, version: int, body: dict[str, Any]) -> bool:
    """Whether only brokers send this version or content of an API that clients use too."""
    if (api == "AddPartitionsToTxn" and version >= 4) or (api == "OffsetForLeaderEpoch" and version < 2):
        return True
    if api == "FindCoordinator":
        return body.get("keyType") == 2
    replica_ids = [body.get("replicaId", -1), body.get("replicaState", {}).get("replicaId", -1)]
    return api in ("Fetch", "ListOffsets", "OffsetForLeaderEpoch") and any(one not in (-1, -2) for one in replica_ids)


def created(api: str, body: dict[str, Any]) -> list[str]:
    """The topics that a broker may create automatically for this request."""
    if api == "Metadata":
        topics = body["topics"] if body.get("allowAutoTopicCreation") else None
        return [topic["name"] for topic in topics or () if topic["name"] is not None]
    if api != "StreamsGroupHeartbeat" or body["topology"] is None:
        return []
    parts = body["topology"]["subtopologies"]
    lists = [part[key] for part in parts for key in ("repartitionSourceTopics", "stateChangelogTopics")]
    return [topic["name"] for topics in lists for topic in topics]


def covers_brokers(rule: dict[str, Any]) -> bool:
    names = rule.get("api", "*")
    return bool({"*", "broker"} & {*([names] if isinstance(names, str) else names)})


def can_name(api: str, version: int) -> set[str]:
    """The kinds of resources that requests of a version can name: those of a request with every field."""
    message = next(a.request for a in schema().apis.values() if a.name == api)

    def full(fields: Any) -> dict[str, Any]:
        return {
            field.name: [full(field.fields) if field.is_struct else _one(field.element_type)]
            if field.is_array
            else full(field.fields)
            if field.is_struct
            else _one(field.type)
            for field in fields
            if version in field.versions
        }

    if "Configs" in api and api != "ListConfigResources":
        return {"topic", "group"}
    if api == "FindCoordinator":
        return {"group", "transactional_id"}
    kinds = {kind if kind != "all" else name for kind, name in accesses(api, version, full(message.fields))}
    return kinds | ({"topic"} if api == "InitProducerId" else set())


def _one(kind: str) -> Any:
    return {"string": "x", "uuid": UUID(int=9)}.get(kind, 1)


def has_api(rule: dict[str, Any], api: str) -> bool:
    return any(
        name == "*" or name == api or api in GROUPS.get(name, ())
        for name in ([rule["api"]] if isinstance(rule.get("api", "*"), str) else rule["api"])
        if True
    ) if "api" in rule else True  # fmt: skip


def applies(rule: dict[str, Any], api: str, version: int, who: dict[str, str]) -> bool:
    if not has_api(rule, api):
        return False
    if "version" in rule and not int(rule["version"].split("-")[0]) <= version <= int(rule["version"].split("-")[1]):
        return False
    if "principal" in rule and not fnmatch.fnmatchcase(who["principal"], rule["principal"]):
        return False
    if "client_id" in rule and not fnmatch.fnmatchcase(who["client_id"], rule["client_id"]):
        return False
    return "address" not in rule or ipaddress.ip_address(who["address"]) in ipaddress.ip_network(rule["address"])


KINDS = ("topic", "group", "transactional_id")


def allowed(
    rules: list[dict[str, Any]], default: bool, api: str, version: int, who: dict[str, str], access: tuple[str, Any]
) -> bool | None:
    """None: undecided, since the name of the topic id is unknown."""
    kind, name = access
    mine = [rule for rule in rules if applies(rule, api, version, who)]
    if isinstance(name, UUID):
        if name not in KNOWN_IDS:
            outcomes = set()
            for rule in mine:
                if "topic" in rule or not any(of in rule for of in KINDS):
                    outcomes.add(rule["action"] == "allow")
                if not any(of in rule for of in KINDS):
                    break  # later rules are never evaluated
            else:
                outcomes.add(default)
            return outcomes.pop() if len(outcomes) == 1 else None
        name = KNOWN_IDS[name]
    for rule in mine:
        patterns = [of for of in KINDS if of in rule]
        allows = rule["action"] == "allow"
        if not patterns:
            return allows
        if kind in KINDS:
            globs = rule.get(kind, [])
            if any(fnmatch.fnmatchcase(name, glob) for glob in ([globs] if isinstance(globs, str) else globs)):
                return allows
        elif kind == "nothing":
            kinds = {"topic"} if api == "InitProducerId" else can_name(api, version)
            if allows and set(patterns) & kinds:
                return True
        elif kind == "all" and api not in TOUCHES_ALL:
            if allows and name in rule:
                return True
        elif kind == "all" and name in rule and (not allows or rule[name] == "*"):
            return allows
    return default


def expected(settings: dict[str, Any], layout: Layout, body: dict[str, Any], who: dict[str, str]) -> str:
    """The treatment of a request: forwarded, refused, "in part", or "no session"."""
    api = schema().apis[layout.api_key].name
    rules = settings["rules"]
    default = {"allow": True, "deny": False, None: not any(rule["action"] == "allow" for rule in rules)}[
        settings["default"]
    ]
    if api in GROUPS["always"]:
        return "forwarded"
    of_brokers = only_brokers_send(api, layout.version, body)
    if settings["read_only"] and (of_brokers or api not in (*GROUPS["read"], *GROUPS["describe"])):
        return "refused"
    all_rules, all_default = rules, default
    if of_brokers:
        rules = [
            {key: value for key, value in rule.items() if key != "api"} if covers_brokers(rule) else rule
            for rule in rules
            if covers_brokers(rule) or rule["action"] == "deny"
        ]
    if of_brokers or api in CLUSTER_ONLY:
        rules = [rule for rule in rules if rule["action"] == "deny" or not any(of in rule for of in KINDS)]
    if of_brokers or api in GROUPS["broker"]:
        default = default and not all_rules
    if api == "Envelope":  # judged like an unknown API, whatever it contains
        for rule in rules:
            names_it = rule.get("api", "*") != "*" and not any(of in rule for of in KINDS)
            if applies(rule, api, layout.version, who) and (names_it or rule["action"] == "deny"):
                return "forwarded" if rule["action"] == "allow" else "refused"
        return "refused" if rules or not default else "forwarded"
    found = accesses(api, layout.version, body) or [("nothing", "")]
    found += [("cluster", "")] if of_brokers or api in CLUSTER_ONLY or body.get("enable2Pc") else []
    if "Configs" not in api and api not in OF_THE_CLUSTER and not can_name(api, layout.version):
        found = [("nothing", "")]
    verdicts = {access: allowed(rules, default, api, layout.version, who, access) for access in found}
    if api == "StreamsGroupHeartbeat":
        for name in created(api, body):
            topic = ("topic", name)
            verdicts["created", name] = allowed(all_rules, all_default, "CreateTopics", 7, who, topic)
    if all(verdicts.values()):
        someone = allowed(rules, default, api, layout.version, who, ("topic", UUID(int=77)))
        if api == "Fetch" and layout.version >= 7 and not someone:  # it may not read every topic: no session
            if body["sessionEpoch"] > 0:
                return "no session"
            return "forwarded" if (body["sessionId"], body["sessionEpoch"]) == (0, -1) else "in part"
        if api in ("ShareFetch", "ShareAcknowledge") and not someone:  # it could continue a session of another client
            return "forwarded" if api == "ShareFetch" and body["shareSessionEpoch"] == 0 else "no session"
        return "forwarded"
    if api == "Metadata" and not any(kind in ("all", "nothing") for kind, _ in found):
        return "in part"
    return "refused"


# --- the fuzz ---------------------------------------------------------------------------------------------------------

GLOBS = ("*", "orders", "orders*", "secret-*", "a?p*", "app-1", "b", "[x]", "*-1")


def random_rule(rng: random.Random, api: str) -> dict[str, Any]:
    rule: dict[str, Any] = {"action": rng.choice(("allow", "deny"))}
    chosen = rng.random()
    if chosen < 0.45:
        rule["api"] = api
    elif chosen < 0.6:
        rule["api"] = rng.choice(("read", "write", "describe", "admin", "broker", ["read", "Produce"]))
    for kind in KINDS:
        if rng.random() < 0.35:
            rule[kind] = rng.choice([glob for glob in GLOBS if "[" not in glob])
    if rng.random() < 0.1:
        rule["version"] = rng.choice(("0-3", "4-99"))
    if rng.random() < 0.15:
        rule["principal"] = rng.choice(("User:alice", "User:bob", "User:*"))
    if rng.random() < 0.15:
        rule["client_id"] = rng.choice(("c*", "other", "?"))
    if rng.random() < 0.1:
        rule["address"] = rng.choice(("10.0.0.0/8", "192.168.0.0/16"))
    return rule


def outcome(talk: Decided, frame: bytes) -> str:
    if talk.faults:
        assert talk.faults[0].kind == "refused" and talk.faults[0].fatal, talk.faults[0].text
        return "closed"
    if talk.requests() == [frame]:
        return "forwarded"
    if talk.requests():
        return "in part"
    assert len(talk.answers()) == 1
    return "answered"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_the_policy_agrees_with_the_second_evaluator(seed):
    rng = random.Random(seed)
    tally: Counter[str] = Counter()
    for layout in rng.sample(REQUESTS, len(REQUESTS)) * 2:
        api = schema().apis[layout.api_key].name
        settings = {
            "rules": [random_rule(rng, api) for _ in range(rng.choice((0, 1, 2, 2, 3, 4)))],
            "default": rng.choice((None, "allow", "deny")),
            "read_only": rng.random() < 0.1,
        }
        who = {"principal": rng.choice(("User:alice", "User:bob")), "client_id": "c", "address": "10.1.2.3"}
        body = random_body(layout, rng)
        frame = layout.encode(body, "c")
        request = codec.decode_request(frame)[1]
        if layout.message.header_version(layout.version) == 0:
            who["client_id"] = ""  # its header has no client id
        names = TopicNames()
        names.learn(KNOWN_IDS)
        talk = Decided(
            *settings["rules"],
            principal=who["principal"],
            address=who["address"],
            policy_default=settings["default"],
            read_only=settings["read_only"],
            names=names,
        )
        cuts = sorted(rng.sample(range(1, len(frame) + 4), rng.choice((0, 0, 1, 2, 5)) % (len(frame) + 3)))
        talk.client(sized(frame), cuts)
        came = outcome(talk, frame)
        says = expected(settings, layout, request, who)
        default = {None: not any(rule["action"] == "allow" for rule in settings["rules"])}.get(
            settings["default"], settings["default"] == "allow"
        )
        clears = api == "Metadata" and not all(
            not settings["read_only"] and allowed(settings["rules"], default, "CreateTopics", 7, who, ("topic", name))
            for name in created(api, request)
            if says == "forwarded" or allowed(settings["rules"], default, api, layout.version, who, ("topic", name))
        )
        context = f"{layout} {settings} {who} {request}"
        if says == "forwarded":
            assert came == ("in part" if clears else "forwarded"), context
        elif says == "no session":
            assert came == "answered", context
        elif says == "in part" and api == "Fetch":
            (asked,) = talk.requests()
            patched = codec.decode_request(asked)[1]
            assert patched == {**request, "sessionId": 0, "sessionEpoch": -1}, context
        elif says == "in part":  # Metadata by name: forwarded with the allowed topics
            assert came in ("in part", "forwarded"), context
            (asked,) = talk.requests()
            asked_body = codec.decode_request(asked)[1]
            assert asked_body.get("allowAutoTopicCreation") == (
                False if clears else request.get("allowAutoTopicCreation")
            ), context
            for topic in request["topics"]:
                found = [("topic", topic[key]) for key in ("name", "topicId") if topic.get(key)]
                found = [access for access in found if not isinstance(access[1], UUID) or access[1].int]
                verdicts = [allowed(settings["rules"], default, api, layout.version, who, one) for one in found]
                wanted = False not in verdicts
                assert wanted == (topic in asked_body["topics"]), context
        else:
            assert came in ("answered", "closed"), context
            if came == "answered":
                errors = codec.response_scan(layout.api_key, layout.version)(
                    memoryview(talk.sent[CLIENT]), 8, len(talk.sent[CLIENT])
                )[2]
                assert set(errors) & {29, 30, 31, 53, 100}, context
        tally[came] += 1
        # Split into pieces, the same request gets the same treatment.
        whole = Decided(
            *settings["rules"],
            principal=who["principal"],
            address=who["address"],
            policy_default=settings["default"],
            read_only=settings["read_only"],
            names=names,
        ).client(sized(frame))
        assert whole.sent == talk.sent, context
    share = {kind: count / tally.total() for kind, count in tally.items()}
    assert share["forwarded"] > 0.3 and share["answered"] > 0.2 and share["closed"] > 0.01 and tally["in part"], tally


# --- responses that mention names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [{"group": "g"}, {"api": "ConsumerGroupDescribe", "group": "*"}, {"api": "69", "group": "?"}]
)
def test_a_client_without_any_rule_about_topics_sees_no_topic_of_a_member(rule):
    key = 69
    member = {"subscribedTopicNames": ["orders"], "assignment": {"topicPartitions": []}}
    members = [member | {"targetAssignment": member["assignment"]}]
    talk = Decided({"action": "allow"} | rule)
    talk.client(playbook.request(key, 1, 1, {"groupIds": ["g"]}))
    body = {"groups": [{"groupId": "g", "members": members}]}
    talk.broker(sized(bytes(codec.encode_response(key, 1, {"correlationId": 1}, body))))
    ((shown,),) = ([one["members"] for one in talk.answer(key, 1)["groups"]],)
    assert [one["subscribedTopicNames"] for one in shown] == [[]]


def test_a_cursor_at_a_hidden_topic_works_without_its_name():
    key = 75
    talk = Decided({"action": "deny", "topic": "secret-*"})
    first = {"topics": [], "responsePartitionLimit": 1, "cursor": None}
    talk.client(playbook.request(key, 0, 1, first))
    topics = [{"errorCode": 0, "name": name, "topicId": IDS[1], "partitions": []} for name in ("orders", "secret-0")]
    page = {"topics": topics, "nextCursor": {"topicName": "secret-1", "partitionIndex": 7}}
    talk.broker(sized(bytes(codec.encode_response(key, 0, {"correlationId": 1}, page))))
    answer = talk.answer(key, 0)
    assert [topic["name"] for topic in answer["topics"]] == ["orders"]
    cursor = answer["nextCursor"]
    assert "secret" not in cursor["topicName"] and cursor["partitionIndex"] == 7
    again = first | {"cursor": cursor}
    talk.client(playbook.request(key, 0, 2, again))
    assert codec.decode_request(talk.requests()[1])[1]["cursor"] == {"topicName": "secret-1", "partitionIndex": 7}


# --- single properties ------------------------------------------------------------------------------------------------


def test_every_api_is_in_exactly_one_group():
    names = [api.name for api in schema().apis.values()]
    members = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(members)
    # APIs without a listener for clients are served by brokers and controllers only.
    for api in schema().apis.values():
        if "broker" not in api.listeners:
            assert api.name in GROUPS["broker"], api.name


def test_patterns_match_names():
    rng = random.Random(1)
    for _ in range(3000):
        pattern = "".join(rng.choice("ab*?") for _ in range(rng.randrange(7)))
        name = "".join(rng.choice("ab") for _ in range(rng.randrange(8)))
        assert Patterns([pattern]).match(name) == fnmatch.fnmatchcase(name, pattern), (pattern, name)
    assert Patterns([r"a\*"]).match("a*") and not Patterns([r"a\*"]).match("ab")
    assert Patterns(["a.b"]).match("a.b") and not Patterns(["a.b"]).match("axb")
    assert Patterns(["x", "*"]).is_all and not Patterns(["?"]).is_all
    # A name chosen by a client cannot make the match slow.
    assert not Patterns(["*a*a*a*a*a*a*a*b"]).match("a" * 32_000)


def test_the_default_denies_if_a_rule_allows():
    assert Policy(cluster()).is_empty
    assert Policy(cluster({"action": "deny", "topic": "x"})).default.allowed
    assert not Policy(cluster({"action": "allow", "topic": "x"})).default.allowed
    assert Policy(cluster({"action": "allow", "topic": "x"}, policy_default="allow")).default.allowed
    assert not Policy(cluster(policy_default="deny")).is_empty


def test_only_versions_that_rules_can_read_are_offered():
    policy = Policy(cluster({"action": "deny", "topic": "x"}))
    caps = policy.caps()
    assert caps[0] == schema().apis[0].request.versions[-1] and 12 not in caps and 18 not in caps


DENY_NEW_FETCH = {"action": "deny", "api": "Fetch", "version": "13-"}


@pytest.mark.parametrize(
    ("rules", "refused"),
    [
        ([DENY_NEW_FETCH], {1: range(13, 19)}),
        ([{"action": "allow", "api": ["Fetch", "Produce"], "version": "4-"}], {0: range(4), 1: range(4)}),
        ([DENY_NEW_FETCH | {"client_id": "old-*"}], {1: range(13, 19)}),
        ([DENY_NEW_FETCH | {"client_id": "other"}], {}),
        ([DENY_NEW_FETCH | {"principal": "User:bob"}], {}),
        ([DENY_NEW_FETCH | {"topic": "secret"}], {1: ()}),  # requests for other topics may pass
        ([{"action": "allow", "topic": "orders"}, DENY_NEW_FETCH], {1: ()}),
        ([{"action": "deny", "topic": "secret"}], {}),
        ([{"action": "deny", "api": "SaslHandshake", "version": "0"}], {17: ()}),  # this API always passes
    ],
)
def test_versions_without_any_allowed_request_are_found(rules, refused):
    found = Policy(cluster(*rules)).identity("User:alice", "10.1.2.3")("old-client").refused_versions
    assert found == {key: frozenset(versions) for key, versions in refused.items()}


ALLOW = {"action": "allow"}


@pytest.mark.parametrize(
    ("rules", "is_offered"),
    [
        ([DENY_NEW_FETCH | {"principal": "User:bob"}, ALLOW], True),
        ([DENY_NEW_FETCH | {"principal": ["User:bob", "User:eve"]}, DENY_NEW_FETCH | {"principal": "User:al*"}], True),
        ([DENY_NEW_FETCH | {"principal": "User:*"}, ALLOW], False),
        ([DENY_NEW_FETCH | {"principal": "*"}, ALLOW], False),
        ([ALLOW | {"principal": "User:bob"}, DENY_NEW_FETCH], True),  # what bob may use
        ([ALLOW | {"principal": name, "api": "Fetch", "version": "0-12"} for name in ("User:bob", "User:eve")], False),
    ],
)
def test_before_a_login_versions_are_offered_that_a_principal_may_use(rules, is_offered):
    """Rules that each name some principals deny nothing to others, even if these are all that there are."""
    found = Policy(cluster(*rules)).before_login("10.1.2.3")(None).refused_versions
    assert (13 not in found.get(1, ())) is is_offered


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"action": "allow", "api": "produce"}, "did you mean Produce?"),
        ({"action": "allow", "api": "always"}, "is no API"),
        ({"action": "allow", "version": "9-3"}, "no range of versions"),
        ({"action": "allow", "address": "10.0.0.1/8"}, "did you mean 10.0.0.0/8"),
        ({"action": "allow", "topic": []}, "is empty"),
        ({"action": "allow", "topic": "a\\"}, "backslash"),
        ({"action": "permit"}, "'allow' or 'deny'"),
        ({"action": "allow", "topics": "x"}, "Extra inputs"),
    ],
)
def test_the_error_of_a_wrong_rule_explains_it(rule, says):
    with pytest.raises(ValidationError, match=says.replace("?", r"\?")):
        cluster(rule)


def test_an_allowed_frame_is_forwarded_unchanged():
    layout = next(layout for layout in REQUESTS if layout.api_key == 0 and layout.version == 9)
    frame = sized(layout.encode(random_body(layout, random.Random(3))))
    assert Decided({"action": "deny", "topic": "nobody"}).client(frame, [7, 20]).sent[BROKER] == frame


def test_the_docs_list_the_limits_of_a_policy():
    assert not missing(
        "limits.md",
        f"of more than {resources.FEW_ELEMENTS} elements or {size(authorizer.SHORT_REQUEST)},"
        f" and an answer of more than {size(authorizer.SHORT_ANSWER)} that it edits",
        f" {resources.MAX_ELEMENTS:,} elements of a request",
        f"| {policy.MAX_CLIENT_IDS} client ids of {policy.MAX_NAME} characters, {authorizer.MAX_TREATMENTS} APIs,"
        f" {share_sessions.MOST} share sessions |",
        f"of a cluster {size(policy.MAX_REMEMBERED_BYTES)} of names, 3 times {size(globs.MAX_BYTES)} of patterns,"
        f" {policy.MAX_API_RULES:,} rules by identity and API",
        f"for the policy {size(pending.MAX_KEPT_BYTES)}",
        f" {size(audit.MAX_WAITING_BYTES)} of the audit",
    )
    assert not missing(
        "policy.md",
        f"at most {audit.MAX_NAMES} of a kind, {audit.MAX_NAME} characters each. A thread writes the lines from a queue"
        f" of {audit.MAX_WAITING:,} lines",
    )
    assert not missing(
        "inside/bounds.md",
        f"| names of topics by id, for the policy | {topic_names.MAX_NAMES} per cluster |",
        f" for a connection under a policy | {share_sessions.MOST}, {authorizer.MAX_CURSORS} |",
        f"| {policy.MAX_REMEMBERED} of a cluster, in {size(policy.MAX_REMEMBERED_BYTES)};"
        f" {policy.MAX_CLEARANCES} sets of rules that apply |",
    )
