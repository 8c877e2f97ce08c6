"""A headless Chromium that opens pages from disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromedriver")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    missing = next((program for program in PROGRAMS if shutil.which(program) is None), None)
    if missing is not None:
        why = f"no {missing} here: `tools/browser.sh install` as root"
        if os.environ.get("HPCRL_REQUIRE_BROWSER") == "1":
            pytest.fail(why)
        pytest.skip(why)
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    profile = tmp_path_factory.mktemp("profile")
    # --no-sandbox: for root, as in CI; pages of this test are the only ones it opens
    flags = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1400,1000")
    for flag in (*flags, "disable-extensions", "disable-background-networking", f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(120)
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """One page at a time. `driver` is selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, scheme: str = "light") -> None:
        """Open a page, and check that it draws itself without an error or a request."""
        media = {"media": "", "features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.get(page.as_uri())
        assert self.run("return document.documentElement.dataset.ready") == "yes", self.console()
        self.check()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def rows(self, selector: str) -> list[list[str]]:
        """The cells of a table's body."""
        rows = "[...document.querySelectorAll(arguments[0] + ' tbody tr')]"
        return self.run(f"return {rows}.map(row => [...row.cells].map(cell => cell.textContent))", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)", selector)

    def type(self, selector: str, *keys: str) -> None:
        """Focus an element and press keys, as a user without a mouse does."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def check(self) -> None:
        """No message in the console, nothing loaded, and no text of a run was executed."""
        assert self.console() == []
        assert self.run("return performance.getEntriesByType('resource').map(entry => entry.name)") == []
        assert self.run("return window.attacked") is None
        assert self.run("return document.querySelectorAll('script').length") == 2
        assert self.run("return document.querySelectorAll('img, iframe, object, embed, link').length") == 0
