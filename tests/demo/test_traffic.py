"""The demo's clients, seen through kproxy: each does what it is there for, and goes on when the cluster does not."""

import asyncio

from kproxy.demo import traffic
from kproxy.demo.cluster import Cluster
from kproxy.wire.events import Exchange
from tests.demo.test_cluster import proxied, until


class Watch:
    """A sink that remembers who did what."""

    def __init__(self):
        self.seen = {}  # (client id, API) -> exchanges

    def connected(self, info):
        def take(events):
            for event in events:
                if isinstance(event, Exchange):
                    self.seen.setdefault((event.client_id, event.plan.api), []).append(event)

        return take

    def find(self, client_id, api):
        return self.seen.get((client_id, api), [])


def test_every_client_does_its_task():
    async def main():
        watch = Watch()
        cluster = Cluster(topics=traffic.TOPICS, quotas=traffic.QUOTAS)
        async with proxied(cluster, watch) as (bootstrap, _), asyncio.timeout(240):
            host, _, port = bootstrap.rpartition(":")
            tasks = [asyncio.ensure_future(work) for work in traffic.clients(host, int(port))]
            try:
                for client_id in ("checkout", "web-frontend", "legacy-billing", "nightly-export"):
                    await until(lambda who=client_id: any(e.acks for e in watch.find(who, "Produce")))
                await until(lambda: any(e.acks == 0 for e in watch.find("sensors", "Produce")))
                await until(lambda: any(e.throttle_ms > 0 for e in watch.find("nightly-export", "Produce")))
                for client_id in ("fraud-detector", "session-builder", "data-lake-sink", "dashboards"):
                    await until(lambda who=client_id: any(e.response_bytes > 500 for e in watch.find(who, "Fetch")))
                await until(lambda: any(3 in e.errors for e in watch.find("wrong-topic", "Metadata")))
                await until(lambda: watch.find("lag-monitor", "DescribeCluster"))

                # A leader moves, and a broker goes and comes back: they find out, and go on.
                for partition in range(traffic.TOPICS["clicks"]):
                    cluster.move_leader("clicks", partition)
                await until(lambda: any(6 in e.errors for e in watch.find("web-frontend", "Produce")))
                broker = cluster.brokers[2]
                await broker.stop()
                await broker.start()
                count = len(watch.find("web-frontend", "Produce"))
                await until(
                    lambda: (
                        any(not e.errors for e in watch.find("web-frontend", "Produce")[count + 50 :])
                        and any(e.response_bytes > 500 for e in watch.find("session-builder", "Fetch")[-10:])
                    )
                )
                assert not [task for task in tasks if task.done()]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
