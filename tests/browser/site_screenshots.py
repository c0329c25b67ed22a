"""Takes pictures of the documentation site, to look at after a change of its look.

`python -m tests.browser.site_screenshots SITE DIRECTORY` writes the front page, a page of text and
a search as PNG files. SITE is a folder that `make docs` has built.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import OPTIONS, TIMEOUT_MS

SIZE = {"width": 1280, "height": 860}


def search(page: Page, words: str) -> None:
    """Types into the search, and waits for results."""
    page.get_by_role("textbox", name="Search").first.fill(words)
    page.locator(".md-search-result__item").first.wait_for()


def main(site: Path, directory: Path) -> None:
    """Takes all pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=list(OPTIONS))
        page = browser.new_page(viewport={"width": SIZE["width"], "height": SIZE["height"]})
        page.set_default_timeout(TIMEOUT_MS)
        for name, address in (("front", "index.html"), ("page", "operations/helm.html")):
            page.goto((site / address).absolute().as_uri())
            page.screenshot(path=directory / f"site-{name}.png")
        search(page, "several pipelines")
        page.screenshot(path=directory / "site-search.png")
        browser.close()
    sys.stdout.write(f"{directory}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
