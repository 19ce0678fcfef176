"""The browser of tests: headless Chromium, its one tab, and what tests ask of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


_REFUSALS = ("401 (Unauthorized)", "403 (Forbidden)")


class Page:
    """The browser's one tab, and what tests ask of it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1280, *, dark: bool = False) -> None:
        self.size(width, 900, dark=dark)
        self.driver.get(url)

    def size(self, width: int, height: int, *, dark: bool) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def text(self, element_id: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).textContent", element_id))

    def wait(self, condition: Callable[[], Any], seconds: float = 20) -> Any:
        return WebDriverWait(self.driver, seconds, 0.05).until(lambda _: condition())

    def wait_for(self, element_id: str, words: str, seconds: float = 20) -> None:
        self.wait(lambda: words in self.text(element_id), seconds)

    def ask(self, text: str, max_tokens: int = 24) -> None:
        """Type the last word and press Enter; what comes before it is put there at once."""
        self.run("document.getElementById('max-tokens').value = arguments[0]", max_tokens)
        box = self.driver.find_element(By.ID, "message")
        self.run("arguments[0].value = arguments[1]", box, text[:-1])
        box.send_keys(text[-1], Keys.ENTER)

    def press(self, key: str) -> None:
        """Press a key wherever the focus is."""
        ActionChains(self.driver).send_keys(key).perform()

    def give_key(self, key: str) -> None:
        """Type a key into the dialog that asks for one."""
        field = self.wait(lambda: self.driver.find_element(By.CSS_SELECTOR, "dialog[open] input"))
        field.send_keys(key, Keys.ENTER)

    def answered(self, seconds: float = 20) -> str:
        """The note under the last answer, once it is whole."""
        busy = "return document.getElementById('log').getAttribute('aria-busy')"
        self.wait(lambda: self.run(busy) == "false", seconds)
        return str(self.run("return [...document.querySelectorAll('#log .assistant .note')].at(-1).textContent"))

    @property
    def complaints(self) -> list[str]:
        """What the console was told since it was asked last, refusals of the key apart, which it always mentions."""
        entries: list[dict[str, Any]] = self.driver.get_log("browser")
        return [e["message"] for e in entries if not any(code in e["message"] for code in _REFUSALS)]


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """The browser; the test is skipped where there is none, and fails in CI."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        if os.environ.get("CI") or os.environ.get("KNOTCTL_REQUIRE_CHROMIUM"):
            pytest.fail("chromium or chromedriver is absent")
        pytest.skip("chromium or chromedriver is absent (.ci/run installs them)")
    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    for switch in (*SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(programs[1])))
    try:
        yield driver
    finally:
        driver.quit()
