"""Names of topics are asked for once at a time, of the next broker if one does not answer, and again when needed."""

import asyncio
from types import SimpleNamespace
from uuid import UUID

from kproxy.errors import UpstreamError
from kproxy.proxy.cluster.questions import topic_naming
from kproxy.proxy.cluster.questions.topic_naming import TopicNaming

ONE, TWO = UUID(int=1), UUID(int=2)


def test_names_are_asked_for_one_request_at_a_time_and_again_when_needed(monkeypatch):
    asked = []

    async def test():
        answers = asyncio.Event()

        async def ask(address, connector, unknown):
            asked.append((address, unknown))
            await answers.wait()
            if address == "silent":
                raise UpstreamError("no answer")
            return {ONE: "orders"}

        monkeypatch.setattr(topic_naming, "ask_topic_names", ask)
        monkeypatch.setattr(topic_naming, "NAMING_PAUSE_S", 0)
        addresses = SimpleNamespace(in_order=lambda: ["silent", "answers", "last"])
        spawned = []
        tasks = SimpleNamespace(spawn=lambda work: spawned.append(asyncio.create_task(work)))
        naming = TopicNaming("default", addresses, None, tasks)
        assert naming.names.get(ONE) is None
        assert naming.is_asking
        await asyncio.sleep(0)
        assert naming.names.get(TWO) is None and len(spawned) == 1  # the request is under way, without it
        answers.set()
        await spawned.pop()
        assert asked == [("silent", [ONE]), ("answers", [ONE])]
        assert naming.names.get(ONE) == "orders" and not naming.is_asking
        assert naming.names.get(TWO) is None and naming.is_asking
        await spawned.pop()
        assert asked[2:] == [("silent", [TWO]), ("answers", [TWO])]
        assert not spawned

    asyncio.run(test())
