"""Makes the pictures of docs/pictures/ from a real run: `./dev screenshots`, or `python tools/make_screenshots.py`.

The run is `kproxy demo`, recorded: its page in Chromium, light and dark, `kproxy top` on it, and the report of what it
recorded. Bounded: MINUTES of it, MAX_BYTES each. It needs the extra `dev`, Chromium and its driver.
"""

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kproxy.admin.asking import AdminPort  # noqa: E402
from kproxy.analysis import jobs  # noqa: E402 (of this checkout)
from kproxy.analysis.duck import Tables  # noqa: E402
from kproxy.views import drawing, plots  # noqa: E402
from kproxy.views.top.screen import Top  # noqa: E402
from kproxy.views.top.source import Source  # noqa: E402
from tests.chromium import Browser, opened  # noqa: E402

FOLDER = ROOT / "docs/pictures"
MINUTES = 2.0
MAX_BYTES = 300_000
KPROXY = (sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kproxy.cli import main; main()")
ENDS_S = 60


@contextmanager
def demo(tables: Path) -> Iterator[str]:
    """The address of the admin port of a demo that runs."""
    command = [*KPROXY, "demo", "--record", str(tables)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"page at (http://\S+)/,", process.stdout.readline())
            if found is None:
                raise SystemExit("the demo did not say where its page is")
            yield found[1]
        finally:
            process.terminate()
            process.communicate(timeout=ENDS_S)


def show(browser: Browser, height: int) -> None:
    width = browser.asked("return window.innerWidth")
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    time.sleep(2.5)  # the page draws once a second


def page(url: str, theme: str, name: str) -> None:
    with opened(f"{url}/?range=300&theme={theme}", 1440) as browser:
        time.sleep(6)  # rates are of the last seconds
        show(browser, 1000)
        browser.chrome.save_screenshot(str(FOLDER / name))


def report(tables: Path, name: str, folder: Path) -> None:
    file = folder / "report.html"  # it names the tables as they are named here
    subprocess.run([*KPROXY, "report", tables.name, "--out", str(file)], cwd=folder, check=True)
    with opened(file, 1200) as browser:
        show(browser, 760)
        browser.chrome.save_screenshot(str(FOLDER / name))


def plot(tables: Path, name: str) -> None:
    """The heat map of docs/report.md, as a drawing on white."""
    with Tables(str(tables)) as asked:
        chart = plots.heat_map(jobs.spread(asked["exchanges"], every="5 seconds"), "5 seconds")
        drawn = drawing.svg(chart, "How latencies of each API are spread, over time")
    (FOLDER / name).write_text(drawn.replace('role="group"', 'role="img" style="background:#fff"', 1))


async def top(url: str, name: str, width: int, height: int) -> None:
    app = Top(Source(AdminPort(url)))
    async with app.run_test(size=(width, height)) as pilot:
        await pilot.pause(12)
        drawn = app.export_screenshot(title="kproxy top")
    drawn = re.sub(
        r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL
    )  # fonts of the reader's, nothing from elsewhere
    drawn = re.sub(r"<!--.*?-->\s*", "", drawn, flags=re.DOTALL)
    label = "kproxy top in a terminal: APIs with requests a second, latencies, errors and bytes"
    (FOLDER / name).write_text(drawn.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kproxy-pictures-") as place:
        folder = Path(place)
        with demo(folder / "tables") as url:
            time.sleep(60 * MINUTES)
            asyncio.run(top(url, "top.svg", 112, 16))
            page(url, "light", "page-light.png")
            page(url, "dark", "page-dark.png")
        report(folder / "tables", "report.png", folder)
        plot(folder / "tables", "latencies.svg")
    for picture in sorted(FOLDER.iterdir()):
        size = picture.stat().st_size
        print(f"{picture.relative_to(ROOT)}: {size:,} bytes")
        if size > MAX_BYTES:
            raise SystemExit(f"{picture.name} is larger than {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main()
