"""README and docs name only what exists, all folders are on the map, a page takes ten minutes."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_WORDS = 2_200
"""Words of a page: what a reader takes in within ten minutes."""
REFERENCES = {"api.md", "settings.md"}
"""Pages in which a reader looks something up: they may be of any length."""
MAX_LINE = 120
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def tree() -> list[str]:
    """The folders that the README lists, with a slash at the end."""
    section = README.partition("## Where things are")[2].partition("## ")[0]
    return re.findall(r"^    (\S+/)\s", section, flags=re.M)


def tracked_folders() -> set[str]:
    """Folders of the repository: those of the root, and two levels deeper under services."""
    listing = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    folders = [Path(line).parent.parts for line in listing.splitlines()]
    roots = {parts[0] for parts in folders if parts and not parts[0].startswith(".")}
    services = {
        "/".join(parts[:depth])
        for parts in folders
        if parts[:1] == ("services",)
        for depth in range(2, min(len(parts), 3) + 1)
    }
    found = roots - {"services", "protos"} | {"protos/orcinus/v1"} | services
    return {f"{folder}/" for folder in found}


def test_the_tree_of_the_readme_is_the_tree() -> None:
    assert set(tree()) == tracked_folders()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_that_are_named_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    paths = re.findall(r"`((?:services|tests|kernels|protos|models)/[\w/.]+)`", page.read_text())
    assert [path for path in paths if not (ROOT / path).exists() and path != "protos/gen"] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in REFERENCES], ids=lambda page: page.name
)
def test_a_page_can_be_read_in_ten_minutes(page: Path) -> None:
    words = [word for word in page.read_text(encoding="utf-8").split() if re.search(r"\w", word)]
    assert len(words) <= MAX_WORDS


def test_every_page_can_be_found_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", README))
    pages = {str(page.relative_to(ROOT)) for page in PAGES if page.name != "README.md"}
    assert pages <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_wrapped(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > MAX_LINE and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text(encoding="utf-8"))
    assert [
        (path, anchor) for path, anchor in links if anchor not in anchors(page.parent / path, page)
    ] == []


def anchors(path: Path, page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of `path`, or of `page` where that is a folder."""
    text = (page if path.is_dir() else path).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_first_line_says_who_it_is_for(page: Path) -> None:
    first = page.read_text(encoding="utf-8").split("\n\n")[1]
    assert first.startswith(("This page is for ", "For "))
