"""The page at the admin port's /: files that a browser reads as they are, and the library that draws its charts.

Duty: load them. There is no build step: index.html, page.css and page.js stand here, d3.js comes from the package
XStatic-D3. They hold no data: page.js asks /api/live once a second. What a browser may do is in PAGE_HEADERS: nothing
but to load these files and to ask this server; no inline script or style, no other host.
Refuses to know what is shown.
"""

from collections.abc import Mapping
from importlib import metadata, resources
from typing import NamedTuple

PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_D3 = ("XStatic-D3", "xstatic/pkg/d3/data/d3.js")  # not imported: its namespace package wants setuptools


class Asset(NamedTuple):
    """A file as it is sent."""

    body: bytes
    content_type: str


def load_page() -> dict[str, Asset] | None:
    """The files by name; None where the package with the charts is not installed."""
    found = {
        name: Asset(resources.files(__name__).joinpath(name).read_bytes(), content_type)
        for name, content_type in _TYPES.items()
    }
    package, path = _D3
    try:
        files = metadata.files(package) or ()
    except metadata.PackageNotFoundError:
        return None
    charts = next((file for file in files if str(file) == path), None)
    if charts is None:
        return None
    return {**found, "d3.js": Asset(charts.read_binary(), _TYPES["page.js"])}
