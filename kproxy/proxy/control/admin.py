"""The operator's HTTP: /metrics, /health, /ready, live state as JSON under /api/, and a page of links.

Duty: answer questions about this process without disturbing it. A scrape is rendered on a thread of its own and takes
the interpreter in short turns, so that the relay goes on in between; everything else is small.

Invariants: nothing here changes anything; every answer is made anew (no cache, here or on the way); one scrape is
rendered at a time. Refuses to know metrics, sessions and sockets of Kafka: it is given callables.
"""

import asyncio
import html
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kproxy import __version__
from kproxy.proxy.relay.listeners import listening, resolve

# While two threads want the interpreter, one gets it back after this long. Python's 5 ms, times the system calls of the
# relay, would stop the traffic for as long as a scrape lasts; measured with 7,500 samples: p99.9 5.1 ms, so 0.6 ms.
_TURN_S = 0.0002

_THREAD_BYTES = 4096  # answers from this size on are compressed on a thread
_BACKLOG = 128
_SHUTDOWN_S = 1.0  # answers under way when the process ends

log = logging.getLogger("kproxy.admin")
# Who speaks bad HTTP is told so; a stack for each would let anybody fill the log.
log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>kproxy</title>
<style>
  :root {{ color-scheme: light dark; font: 16px/1.6 system-ui, sans-serif }}
  body {{ max-width: 40rem; margin: 3rem auto; padding: 0 1rem }}
  dt {{ font-family: ui-monospace, monospace }} dd {{ margin: 0 0 .8rem 1.5rem; opacity: .75 }}
  .ready {{ color: seagreen }} .unready {{ color: crimson }}
</style>
<h1>kproxy <small>{version}</small></h1>
<p class="{state}">{readiness}</p>
<dl>{links}</dl>
</html>
"""


class Admin:
    """The HTTP server.

    scrape(accept) -> (body, content type): the metrics in the format that an Accept header names; called on a thread.
    not_ready() -> why traffic should not be sent here yet; nothing: ready.
    api: name -> callable whose value is sent as JSON from /api/<name>; called on the loop, so quick.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        scrape: Callable[[str], tuple[bytes, str]],
        not_ready: Callable[[], Sequence[str]],
        api: Mapping[str, Callable[[], Any]],
    ) -> None:
        self._host = host
        self._port = port
        self._scrape = scrape
        self._not_ready = not_ready
        self._api = api
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="scrape")
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Bind and serve; OSError where the address cannot be bound."""
        app = web.Application()
        app.on_response_prepare.append(_common)
        app.router.add_get("/", self._index)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/api", self._api_names)
        app.router.add_get("/api/{name}", self._api_value)
        sys.setswitchinterval(min(_TURN_S, sys.getswitchinterval()))
        self._runner = web.AppRunner(
            app, access_log=None, logger=log, handle_signals=False, shutdown_timeout=_SHUTDOWN_S
        )
        await self._runner.setup()
        try:
            for sock in listening(resolve(self._host), self._port, _BACKLOG):
                await web.SockSite(self._runner, sock).start()
        except OSError:
            await self.stop()
            raise

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._renderer.shutdown(wait=False, cancel_futures=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens, the port it was given included."""
        if self._runner is None or not self._runner.addresses:
            raise RuntimeError("the admin server has not been started")
        host, port, *_ = self._runner.addresses[0]
        return host, port

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _metrics(self, request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        loop = asyncio.get_running_loop()
        body, content_type = await loop.run_in_executor(self._renderer, self._scrape, accept)
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        return _compressed(request, web.Response(body=body, headers=headers, zlib_executor_size=_THREAD_BYTES))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        reasons = list(self._not_ready())
        status = 503 if reasons else 200
        if "application/json" in request.headers.get("Accept", ""):
            return web.json_response({"ready": not reasons, "reasons": reasons}, status=status)
        text = "".join(f"not ready: {reason}\n" for reason in reasons) or "ready\n"
        return web.Response(text=text, status=status)

    async def _api_names(self, _: web.Request) -> web.Response:
        return web.json_response({name: f"/api/{name}" for name in self._api})

    async def _api_value(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._api:
            raise web.HTTPNotFound(text=f"no such value: /api names them all ({', '.join(self._api)})\n")
        return _compressed(request, web.json_response(self._api[name]()))

    async def _index(self, _: web.Request) -> web.Response:
        links = {
            "/metrics": "Prometheus and OpenMetrics",
            "/health": "the process lives",
            "/ready": "traffic can be sent here; if not, why",
        } | {f"/api/{name}": "JSON" for name in self._api}
        reasons = list(self._not_ready())
        page = _PAGE.format(
            version=html.escape(__version__),
            state="unready" if reasons else "ready",
            readiness=html.escape("Not ready: " + "; ".join(reasons) if reasons else "Ready."),
            links="".join(f'<dt><a href="{path}">{path}</a></dt><dd>{text}</dd>' for path, text in links.items()),
        )
        return web.Response(text=page, content_type="text/html")


async def _common(_: web.Request, response: web.StreamResponse) -> None:
    """What all answers have in common, refusals included."""
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"


def _compressed(request: web.Request, response: web.Response) -> web.Response:
    """The answer, to be compressed on the way where the client takes gzip."""
    if "gzip" in request.headers.get("Accept-Encoding", "").lower():
        response.enable_compression(web.ContentCoding.gzip)
    return response
