"""The demo's cluster and its clients in a separate process, so that the durations measured are kproxy's own.

It writes the brokers' addresses to standard output, as a line of JSON, and reads the clients' bootstrap address from
standard input. It ends when that input ends, so also when its parent dies.
"""

import asyncio
import json
import signal
import sys

from kproxy.demo import traffic
from kproxy.demo.cluster import Cluster


async def _run() -> None:
    cluster = Cluster(topics=traffic.TOPICS, quotas=traffic.QUOTAS, delay=traffic.delay_s)
    await cluster.start()
    print(json.dumps(cluster.bootstrap), flush=True)
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    line = await stdin.readline()
    if not line:
        return
    host, port = json.loads(line)
    tasks = [asyncio.ensure_future(work) for work in (*traffic.clients(host, port), traffic.move_leaders(cluster))]
    parent = asyncio.ensure_future(stdin.read())
    await asyncio.wait([parent, *tasks], return_when=asyncio.FIRST_COMPLETED)
    failed = [task for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await cluster.stop()
    for task in failed:
        task.result()  # a client ends only by a defect of ours: raise it


def main() -> None:
    import uvloop

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the parent ends this one
    uvloop.run(_run())


if __name__ == "__main__":
    main()
