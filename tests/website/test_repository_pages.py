"""Links from pages to files of the repository lead to pages of the site."""

import posixpath
import re

import pytest

from website.repository_pages import (
    DOCS,
    PAGES,
    ROOT,
    adapted,
    is_prose,
    leads_to,
    linked_files,
    page_of,
    site_path,
)

PROSE = [*PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
LINKED = linked_files(PROSE)
LINK = re.compile(r"(?<!!)\]\((?!\w+:|#)([^)#\s]+)")


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("docs/paper.md", "../kernels/ops.py", "source/kernels/ops.py.md"),
        ("docs/paper.md", "../kernels", "source/kernels/files.md"),
        ("docs/operations/size.md", "../api.md#http", "../api.md#http"),
        ("docs/contributing.md", "../README.md#licence", "source/README.md#licence"),
        ("README.md", "docs/images/predict.png", "../images/predict.png"),
        ("README.md", "clients/python", "clients/python/files.md"),
        ("docs/paper.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/paper.md", "../not-there.py", "../not-there.py"),
    ],
)
def test_a_link_is_changed_to_the_page_of_the_site(page: str, link: str, on_the_site: str) -> None:
    assert adapted(f"See [this]({link}), or `it`.", page) == f"See [this]({on_the_site}), or `it`."


@pytest.mark.parametrize("page", PROSE)
def test_all_that_a_page_links_to_is_on_the_site(page: str) -> None:
    outside = {path for path in leads_to(page) if not path.startswith(DOCS)}
    assert outside <= LINKED | set(PAGES)


@pytest.mark.parametrize("folder", sorted(path for path in LINKED if (ROOT / path).is_dir()))
def test_the_page_of_a_folder_leads_to_its_files(folder: str) -> None:
    at = posixpath.dirname(site_path(folder))
    links = {posixpath.join(at, link) for link in LINK.findall(page_of(folder, LINKED))}
    assert links
    assert links <= {site_path(path) for path in LINKED}


def test_code_is_shown_whole_and_no_prose() -> None:
    path = "kernels/ops.py"
    assert (ROOT / path).read_text("utf-8") in page_of(path, LINKED)
    assert not is_prose(site_path(path))
    assert not is_prose(site_path("kernels"))
    assert is_prose(site_path("README.md"))
    assert is_prose("operations/deploy.md")
