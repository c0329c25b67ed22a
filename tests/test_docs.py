"""What README and docs say exists does exist, and every place is on the map."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def tree() -> list[str]:
    """The folders that the README lists, with a slash at the end."""
    section = README.partition("## Where things are")[2].partition("## ")[0]
    return re.findall(r"^    (\S+/)\s", section, flags=re.M)


def tracked_folders() -> set[str]:
    """Folders of the repository: those of the root, and one level deeper under services."""
    listing = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    paths = [Path(line) for line in listing.splitlines()]
    roots = {path.parts[0] for path in paths if len(path.parts) > 1 and path.parts[0][0] != "."}
    services = {f"services/{path.parts[1]}" for path in paths if path.parts[0] == "services"}
    folders = roots - {"services", "protos"} | {"protos/orcinus/v1"} | services
    return {f"{folder}/" for folder in folders if "__" not in folder}


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
