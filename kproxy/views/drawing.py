"""A chart of `plots` as an SVG drawing for a page: no script, colours that the page can replace, a text for each mark.

Duty: Vega runs here, inside vl-convert, and no part of it is in the page: a drawing prints as it looks, needs no
network and no permission to evaluate code. The description of a mark is its `aria-label`, for screen readers and for
the page's script, which shows it under the pointer. Colours are those of `plots`; the style sheet of a page replaces
them.
"""

import re
from html import escape
from typing import Any

from kproxy.views import plots

_TAG = re.compile(r'<(?:[^<>"]|"[^"]*")*>')
_DROPPED = re.compile(
    r' (?:role|aria-roledescription|font-family|pointer-events|xmlns:xlink|version|stroke-miterlimit)="[^"]*"'
    r'| opacity="1"| class="[^"]*"'
)
_HIDDEN = re.compile(r'<path[^<>"]*(?:"[^"]*"[^<>"]*)*(?:display="none"|d="M0,0h0v0h0Z"|d="")[^<>]*/>')
_PART_LABEL = re.compile(r'<(g) aria-label="[^"]*"')  # of axes and legends, which have texts of their own
_MARK_LABEL = re.compile(r"<([a-z]+) aria-label")
_SIZE = re.compile(r'^<svg[^>]* viewBox="([\d. -]+)"[^>]*>')
_CONFIG = {
    "background": None,
    "font": "Arial, sans-serif",
    "autosize": {"type": "fit", "contains": "padding"},
    "padding": {"left": 8, "right": 12, "top": 4, "bottom": 4},
    "view": {"stroke": None},
    "axis": {
        "labelColor": plots.FAINT,
        "titleColor": plots.TEXT,
        "gridColor": plots.GRID,
        "domainColor": plots.AXIS,
        "tickColor": plots.AXIS,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 10,
    },
    "legend": {
        "labelColor": plots.FAINT,
        "titleColor": plots.TEXT,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "symbolSize": 60,
        "rowPadding": 1,
        "columnPadding": 16,
        "offset": 6,
    },
}


def svg(chart: Any, title: str) -> str:
    """Return the drawing as an HTML element, as wide as its container. Raises ValueError if vl-convert draws none."""
    import vl_convert

    spec = chart.to_dict(validate=False)
    spec["config"] = _CONFIG
    text = vl_convert.vegalite_to_svg(spec, vl_version=".".join(spec["$schema"].split("/v")[-1].split(".")[:2]))
    text = _TAG.sub(lambda tag: _DROPPED.sub("", tag[0]), text)
    text = _HIDDEN.sub("", text)
    text = _PART_LABEL.sub(r"<\1", text)
    text = _MARK_LABEL.sub(r'<\1 role="img" aria-label', text)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="group" aria-label="{escape(title)}" viewBox="'
    text, found = _SIZE.subn(lambda tag: f'{head}{tag[1]}">', text)
    if not found:
        raise ValueError("vl-convert gave no drawing")
    while "<g></g>" in text:
        text = text.replace("<g></g>", "")
    return text
