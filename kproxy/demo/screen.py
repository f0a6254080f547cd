"""The demo's screen: `kproxy top` as a process of its own, so that drawing takes no time of the kproxy that is shown.

It reads what it shows, as a line of JSON, from the pipe whose descriptor is its argument, and ends when that pipe ends,
so also when its parent dies. Refuses to know the demo.
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
    """Show what the line names until a key or the parent ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they reach the parent too, which ends this one
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
        except RuntimeError:  # it has not begun yet
            time.sleep(_AGAIN_S)


if __name__ == "__main__":
    main()
