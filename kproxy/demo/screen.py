"""The demo's screen: `kproxy top` as a separate process, so that drawing takes no time from the kproxy that it shows.

It reads its task, as a line of JSON, from the pipe whose descriptor is its argument, and ends when that pipe ends, so
also when its parent dies. Refuses to know the demo.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import TextIO

from kproxy.admin.asking import AdminPort
from kproxy.views.top.screen import Top
from kproxy.views.top.source import Source

_AGAIN_S = 0.05


def main() -> None:
    """Show the given admin port until a key or the parent ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent receives them too, and ends this process
    with os.fdopen(int(sys.argv[1])) as orders:
        line = orders.readline()
        if not line:
            return
        admin, about = json.loads(line)
        app = Top(Source(AdminPort(admin)), about=about)
        threading.Thread(target=_end, args=(orders, app), name="kproxy-demo-end", daemon=True).start()
        app.run()
        os._exit(app.return_code or 0)  # the thread still reads


def _end(orders: TextIO, app: Top) -> None:
    orders.read()
    while True:
        try:
            app.call_from_thread(app.exit)
        except RuntimeError:  # not started yet
            time.sleep(_AGAIN_S)


if __name__ == "__main__":
    main()
