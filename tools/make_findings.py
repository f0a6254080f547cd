"""Makes the lists of docs/findings.md from the code: `python tools/make_findings.py`. A test holds them equal."""

from pathlib import Path

from kproxy.views.findings import document

PAGE = Path(__file__).parents[1] / "docs/findings.md"
MARK = "<!-- below: made by tools/make_findings.py -->\n"

if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + document())
