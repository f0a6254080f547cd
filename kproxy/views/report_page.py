"""The page of a report: its style, its script, and the frame around its sections.

Duty: one file that makes no request: its content security policy forbids all requests, and allows only this style and
this script, by their digests. Light or dark follows the reader's system, or the switch. The style sheet replaces
colours of drawings by value, so that `plots` needs no classes and works in notebooks too. Printed pages are light, with
two plots per row, and without controls.
"""

from base64 import b64encode
from hashlib import sha256
from html import escape

from kproxy.views import plots

MARK = "<!doctype html><!-- kproxy report -->"  # the next report may overwrite a file that begins so

# The colours of `plots`, with their replacements on a dark page.
_DARK = {
    **dict(zip(plots.COLOURS, ("#4aa8e0", "#f08a4b", "#35c79a", "#e3a0c8", "#f0bd4f", "#9bd4f7"), strict=True)),
    **dict(zip(plots.HEAT, ("#17344d", "#1f4f77", "#2b70a6", "#4b95cb", "#8abde3", "#d6e9f8"), strict=True)),
    plots.REST: "#8c8c8c",
    plots.TEXT: "#d8dde3",
    plots.FAINT: "#a5adb7",
    plots.GRID: "#2c333c",
    plots.AXIS: "#6b7480",
}
_LIGHT_PAGE = "--page:#fff;--card:#f7f8fa;--text:#1f2328;--faint:#57606a;--line:#d8dee4;--link:#0059a8;--bad:#b42318;"
_LIGHT_PAGE += "--warn:#8a5a00;color-scheme:light"
_DARK_PAGE = "--page:#14181d;--card:#1b2128;--text:#dfe4ea;--faint:#9aa4b0;--line:#303841;--link:#6cb6ff;--bad:#ff8a80;"
_DARK_PAGE += "--warn:#f0bd4f;color-scheme:dark"

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
main,header,footer,nav{max-width:1240px;margin:0 auto;padding:0 20px}
header{padding-top:20px;position:relative}
h1{font-size:24px;margin:0 130px 4px 0;line-height:1.25}
h2{font-size:19px;margin:34px 0 8px;padding-top:8px;border-top:1px solid var(--line)}
h3{font-size:15px;margin:18px 0 6px}
p{margin:6px 0;max-width:80ch}
a{color:var(--link)}
nav{display:flex;flex-wrap:wrap;gap:2px 14px;margin-top:12px;padding-top:7px;padding-bottom:7px;font-size:13px;
position:sticky;top:0;z-index:8;background:var(--page);border-bottom:1px solid var(--line)}
section{scroll-margin-top:60px}
.faint,figcaption,th,summary,.note{color:var(--faint)}
.note,summary{font-size:13px}
#theme{position:absolute;top:20px;right:20px;font:inherit;font-size:13px;color:var(--text);background:var(--card);
border:1px solid var(--line);border-radius:6px;padding:4px 10px;cursor:pointer}
.verdict{font-size:1.15em;font-weight:600;margin:8px 0 12px;max-width:75em}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:10px;margin:0 0 12px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 12px;min-width:0}
.tiles span,.tiles small{display:block;color:var(--faint);overflow-wrap:anywhere}.tiles b{font-size:1.15em}
.warn{border-left:4px solid var(--warn);background:var(--card);padding:8px 12px;margin:12px 0}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr));gap:14px;
align-items:start;margin:8px 0}
figure,.card{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;
min-width:0;break-inside:avoid}
figcaption{font-size:13px;margin-bottom:4px}
figcaption b{color:var(--text);font-weight:600}
figure svg{display:block;width:100%;height:auto;overflow:visible}
.parts{display:block;width:100%;height:12px;margin:6px 0;border-radius:3px}
.keys{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px}
.keys svg{width:10px;height:10px;margin-right:5px}
svg text{font-family:Arial,"Liberation Sans",Helvetica,sans-serif}
.wide{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin:4px 0}
th,td{text-align:left;padding:3px 14px 3px 0;vertical-align:top;border-bottom:1px solid var(--line);
overflow-wrap:normal;max-width:420px}
td.n,th.n{text-align:right;white-space:nowrap}
td.t{white-space:nowrap}
td.s{min-width:260px;overflow-wrap:anywhere}
code,pre{font:12.5px/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
pre{margin:4px 0;background:var(--page);border:1px solid var(--line);border-radius:6px;padding:6px 8px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 12px;margin:6px 0;font-size:13px}
dt{color:var(--faint)}dd{margin:0;min-width:0}
.card.note{color:var(--text);font-size:inherit}
.level{font-weight:600;text-transform:uppercase;font-size:12px;margin-right:4px}
.critical .level{color:var(--bad)}
.warning .level{color:var(--warn)}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--text);color:var(--page);font-size:12.5px;
padding:4px 8px;border-radius:5px;max-width:min(420px,90vw)}
footer{margin:40px auto 30px;border-top:1px solid var(--line);padding-top:10px}
@media (max-width:600px){main,header,footer,nav{padding-left:12px;padding-right:12px}h1{font-size:20px}
nav{flex-wrap:nowrap;overflow-x:auto;white-space:nowrap;scrollbar-width:none}
#theme{top:14px;right:12px}figure,.card{padding:8px}}
@media print{body{font-size:11px}#theme,nav,#tip,details{display:none}main,header,footer{max-width:none;padding:0}
h1{margin-right:0}h2{break-after:avoid}.figures{grid-template-columns:1fr 1fr;gap:8px}
.wide{overflow:visible}table{font-size:9.5px}th,td{padding-right:8px;max-width:240px}
td.s{min-width:0}
figure,.card,pre{background:none}tr,figure{break-inside:avoid}}
"""

_SCRIPT = """
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shown = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const say = () => { button.textContent = shown() === "dark" ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = shown() === "dark" ? "light" : "dark"; say(); });
  dark.addEventListener("change", say);
  say();
  const tip = document.createElement("div");
  tip.id = "tip"; tip.hidden = true; document.body.append(tip);
  const hide = () => { tip.hidden = true; };
  const show = (event) => {
    const mark = event.target.closest ? event.target.closest("figure svg [aria-label]") : null;
    if (!mark) return hide();
    tip.textContent = mark.getAttribute("aria-label"); tip.hidden = false;
    const x = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 16 + tip.offsetHeight <= innerHeight;
    const y = below ? event.clientY + 16 : event.clientY - tip.offsetHeight - 10;
    tip.style.left = Math.max(x, 4) + "px"; tip.style.top = Math.max(y, 4) + "px";
  };
  const reach = () => document.querySelectorAll(".wide").forEach((box) => {
    box.tabIndex = box.scrollWidth > box.clientWidth ? 0 : -1;  // what scrolls is reached by the keyboard too
  });
  addEventListener("resize", reach);
  reach();
  document.addEventListener("pointermove", show);
  document.addEventListener("pointerdown", show);
  document.addEventListener("scroll", hide, true);
})();
"""


def _colours() -> str:
    """Return the rules that replace colours of drawings, on light and dark pages."""
    rules = []
    for number, colour in enumerate(_DARK):
        rules += [f'svg [{side}="{colour}"]{{{side}:var(--p{number})}}' for side in ("fill", "stroke")]
    return "".join(rules)


def style() -> str:
    """Return the style sheet."""
    light = _LIGHT_PAGE + "".join(f";--p{number}:{colour}" for number, colour in enumerate(_DARK))
    dark = _DARK_PAGE + "".join(f";--p{number}:{colour}" for number, colour in enumerate(_DARK.values()))
    return (
        f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f'@media screen{{:root[data-theme="light"]{{{light}}}:root[data-theme="dark"]{{{dark}}}}}{_colours()}{_STYLE}'
    )


def page(title: str, header: str, contents: str, body: str, footer: str, data: str) -> str:
    """Return the whole file. data: JSON without "<". title: plain text. The other texts are HTML."""
    sheet = style()
    policy = (
        f"default-src 'none'; style-src '{_digest(sheet)}'; script-src '{_digest(_SCRIPT)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return f"""{MARK}
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{sheet}</style></head>
<body><header><button id="theme" type="button" hidden>Dark</button>{header}</header>
<nav>{contents}</nav>
<main>{body}</main>
<footer>{footer}</footer>
<script type="application/json" id="figures">{data}</script>
<script>{_SCRIPT}</script></body></html>
"""


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
