"""A browser, and running systems whose page it looks at.

The browser is the one on the PATH, or that of ORCINUS_CHROMIUM; playwright drives it. Every page
must do without an error on its console: a broken policy or script shows up there.
"""

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.system.stack import ROOT, Stack, serving

DEMO = ROOT / "models" / "demo"
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_MS = 30_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a browser."""
    for item in items:
        if item.nodeid.startswith("tests/browser/"):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium, shared by all tests. Each test opens pages of its own."""
    path = os.environ.get("ORCINUS_CHROMIUM") or shutil.which("chromium")
    assert path, "there is no chromium on the PATH (Debian: apt-get install chromium)"
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(OPTIONS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The demo model on two stages. All tests share the system, so no test may damage it."""
    with serving(DEMO, stages=2, max_batch_size=4, scheduler="speculative-tokens=0") as stack:
        yield stack


class Visitor:
    """A browser that opens pages, and records the messages on their consoles."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.errors: list[str] = []
        self.expected = "$^"
        """A pattern of errors that a test provokes."""

    def open(self, url: str, **options: Any) -> Page:
        """Opens a page. `options` are passed to playwright's browser context."""
        page = self._browser.new_context(accept_downloads=True, **options).new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(url)
        return page

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not re.search(self.expected, message.text):
            self.errors.append(message.text)


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    """Somebody whose pages must have had no error, and are closed after the test."""
    visitor = Visitor(browser)
    yield visitor
    for context in browser.contexts:
        context.close()
    assert visitor.errors == []
