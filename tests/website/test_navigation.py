"""The navigation of the site leads to every page, and to nothing else."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "website" / "mkdocs.yml").read_text(encoding="utf-8")


def test_each_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", SETTINGS, flags=re.M)
    ours = [path for path in listed if not path.startswith(("source/", "reference/"))]
    docs = ROOT / "docs"
    assert sorted(ours) == sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md"))
