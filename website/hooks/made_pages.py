"""Adds the pages that `python -m website.reference` has made, and the icon of a frontend's page."""

from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
MADE = ROOT / "build" / "website"
ICON = ROOT / "services" / "frontend" / "page" / "icon.svg"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the reference pages below `reference/`.

    Raises:
        PluginError: they have not been made.
    """
    made = sorted(MADE.glob("*"))
    if not made:
        raise PluginError(f"{MADE} is empty: run `python -m website.reference build/website` first")
    for file in made:
        uri = f"reference/{file.name}"
        files.append(File.generated(config, uri, content=file.read_text(encoding="utf-8")))
    icon = ICON.read_text(encoding="utf-8")
    files.append(File.generated(config, "images/icon.svg", content=icon))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Gives the front page the width of the navigation, which has nothing more to show there, and
    lets the search find what pages say before what references list."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri.startswith("reference/"):
        page.meta["search"] = {"boost": 0.5}
    return markdown
