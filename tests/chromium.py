"""The system's Chromium, headless, through its own driver: Debian's packages chromium and chromium-driver."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def opened(page: Path | str, width: int = 1280, home: Path | None = None) -> Iterator["Browser"]:
    """A page in a browser, of a file or a URL, with what it asked for and complained about so far.

    home: of its user, whose certificates it trusts (`trusting`).
    """
    binary, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if binary is None or driver is None:
        pytest.skip("Chromium and its driver are missing: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    environment = {**os.environ, **({} if home is None else {"HOME": str(home)})}
    chrome = webdriver.Chrome(options=options, service=Service(driver, env=environment))
    try:
        chrome.set_page_load_timeout(120)
        chrome.set_script_timeout(120)
        chrome.get(page if isinstance(page, str) else page.absolute().as_uri())
        yield Browser(chrome)
    finally:
        chrome.quit()


def trusting(home: Path, authority: Path) -> Path:
    """The home of a user whose programs trust this CA: its database of certificates, by NSS's own tool."""
    certutil = shutil.which("certutil")
    if certutil is None:
        pytest.skip("certutil is missing: apt-get install libnss3-tools")
    database = home / ".pki/nssdb"
    database.mkdir(parents=True)
    for command in (("-N", "--empty-password"), ("-A", "-t", "C,,", "-n", "test", "-i", str(authority))):
        subprocess.run([certutil, "-d", f"sql:{database}", *command], check=True, capture_output=True, timeout=60)
    return home


# Texts of drawings, of which axe cannot tell what is behind them, and lines and keys of charts: WCAG 2.1's contrast, of
# at least 4.5 for texts and 3 for what is drawn.
_FAINT = """
const parts = (colour) => (colour.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
const light = (colour) => {
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = parts(colour).slice(0, 3).map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const colour = getComputedStyle(each).backgroundColor;
    if ((parts(colour)[3] ?? 1) > 0) return colour;
  }
  return "rgb(255, 255, 255)";
};
const found = [];
const check = (elements, colour, least) => elements.forEach((each) => {
  const [one, other] = [light(colour(each)), light(behind(each.parentElement))].sort((a, b) => b - a);
  if ((one + 0.05) / (other + 0.05) < least)
    found.push(`contrast ${((one + 0.05) / (other + 0.05)).toFixed(2)}: ${each.outerHTML.slice(0, 200)}`);
});
check(document.querySelectorAll("svg text"), (each) => getComputedStyle(each).fill, 4.5);
check(document.querySelectorAll("svg path.line"), (each) => getComputedStyle(each).stroke, 3);
check(document.querySelectorAll("ul.legend i"), (each) => getComputedStyle(each).backgroundColor, 3);
return found;
"""


class Browser:
    """What a test asks of a browser; `chrome`: selenium's own."""

    def __init__(self, chrome: Any) -> None:
        self.chrome = chrome

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        said = [json.loads(entry["message"])["message"] for entry in self.chrome.get_log("performance")]
        return [each["params"]["request"]["url"] for each in said if each["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """The lines of the console since the last call."""
        return [entry["message"] for entry in self.chrome.get_log("browser")]

    def asked(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.chrome.execute_script(script, *arguments)

    def barriers(self, *rules: str) -> list[str]:
        """What axe finds that keeps people out: contrast, labels, roles, order of headings; a line for each element.

        rules: some of axe's alone.
        """
        if not self.asked("return !!window.axe"):
            self.asked(resources.files("axe_core_python").joinpath("axe.min.js").read_text())
        script = "axe.run(arguments[0], arguments[1]).then(arguments[2], (fault) => arguments[2](String(fault)))"
        tags = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")
        options = {"runOnly": rules or tags, "resultTypes": ["violations"], "elementRef": False}
        # Of thousands of marks of a drawing the first ones: they are all made alike.
        found = self.chrome.execute_async_script(script, {"exclude": [["svg [role=img] ~ [role=img]"]]}, options)
        assert isinstance(found, dict), found
        return self.asked(_FAINT) + [
            f"{rule['id']}: {node['html'][:200]}: {node['failureSummary']}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]

    def width(self, pixels: int) -> None:
        """Be as wide as a telephone, say."""
        metrics = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefers(self, scheme: str) -> None:
        """The reader's system is "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def printed(self) -> bytes:
        """The page as a PDF."""
        made = self.chrome.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
        return base64.b64decode(made["data"])
