"""Takes the pictures of the page that README and docs show, of a system under a small load.

python -m tests.browser.screenshots docs/images
"""

import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.conftest import DEMO, OPTIONS, TIMEOUT_MS
from tests.system.stack import ROOT, Stack, serving

N_USERS = 6
LOAD_S = 6.0
WIDTH = 1280
LARGE = ROOT / "build" / "llama-125m"


@contextmanager
def load(stack: Stack) -> Iterator[None]:
    """Keeps a few users busy, each with one request after another."""
    is_over = threading.Event()

    def use(seed: int) -> None:
        random = Random(seed)
        while not is_over.wait(random.random() / 2):
            prompt = "What does it do? " * random.randint(1, 8)
            stack.complete(prompt, max_tokens=random.randint(8, 60), seed=seed, ignore_eos=True)

    users = [threading.Thread(target=use, args=(seed,)) for seed in range(N_USERS)]
    for user in users:
        user.start()
    try:
        yield
    finally:
        is_over.set()
        for user in users:
            user.join()


def take(page: Page, name: str, directory: Path) -> None:
    """Saves a screenshot of a page as a file."""
    path = directory / f"{name}.png"
    page.screenshot(path=path)
    sys.stdout.write(f"{path}\n")


def pipeline(browser: Browser, stack: Stack, directory: Path, scheme: str) -> None:
    """The pipeline under load, held so that its blocks are sharp."""
    page = open_page(browser, f"{stack.http}/#pipeline", scheme, height=960)
    with load(stack):
        page.wait_for_timeout(LOAD_S * 1000)
        page.get_by_role("button", name="Pause").click()
    take(page, f"page-pipeline-{scheme}", directory)
    page.context.close()


def compare(browser: Browser, stack: Stack, directory: Path) -> None:
    """Recorded runs of three schedules, one above the other."""
    page = open_page(browser, f"{stack.http}/#compare", "light", height=1560)
    page.locator("#compare canvas").nth(2).wait_for()
    page.wait_for_timeout(500)
    take(page, "page-compare", directory)
    page.context.close()


def playground(browser: Browser, stack: Stack, directory: Path) -> None:
    """An answer, with how sure the model was of a token."""
    page = open_page(browser, f"{stack.http}/#playground", "light", height=860)
    page.get_by_label("Ask as").select_option("completion")
    page.locator("textarea").first.fill("If the file does not exist,")
    page.get_by_label("max_tokens").fill("60")
    page.get_by_label(re.compile("^temperature")).fill("0.7")
    page.get_by_label(re.compile("^seed")).fill("3")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("generated").wait_for()
    page.locator(".token").nth(2).hover()
    page.wait_for_timeout(500)
    take(page, "page-playground", directory)
    page.context.close()


def open_page(browser: Browser, url: str, scheme: str, *, height: int) -> Page:
    """Opens a page in a window of its own."""
    context = browser.new_context(
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": WIDTH, "height": height},
    )
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto(url)
    return page


def main(directory: Path) -> None:
    """Takes all pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=list(OPTIONS)
        )
        with serving(LARGE, stages=2, max_batch_size=4, kv_memory="64MiB") as stack:
            for scheme in ("light", "dark"):
                pipeline(browser, stack, directory, scheme)
        with serving(DEMO, stages=2) as stack:
            compare(browser, stack, directory)
            playground(browser, stack, directory)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
