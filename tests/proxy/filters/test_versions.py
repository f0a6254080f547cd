"""kproxy offers a client only the API versions that its rules may allow."""

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, FETCH, METADATA
from kproxy.proxy.config.policy import Rule
from tests.proxy.live import kproxy, live, request, response

OFFERS = [{"apiKey": key, "minVersion": 0, "maxVersion": newest} for key, newest in ((FETCH, 17), (METADATA, 13))]
RULES = (
    Rule(action="deny", api="Fetch", version="13-", client_id="old-*"),
    Rule(
        action="deny", api="Metadata", client_id="new-*"
    ),  # all versions: they stay, since an authorization error explains more
)


@pytest.mark.parametrize(("client_id", "newest"), [("old-1", 12), ("new-1", 17)])
def test_a_client_is_offered_no_newer_version_than_its_rules_allow(client_id, newest):
    async def test():
        async with kproxy(cluster={"policy": RULES}) as here:
            client, broker = await here.connect()
            await client.send(request(API_VERSIONS, 3, 7, {}, client_id))
            await broker.frame()
            await broker.send(response(API_VERSIONS, 3, 7, {"apiKeys": OFFERS}))
            _, body = codec.decode_response(memoryview(await client.frame())[4:], API_VERSIONS, 3)
            assert [offer["maxVersion"] for offer in body["apiKeys"]] == [newest, 13]

    live(test())
