"""Rewrites pages from CommonMark, which repositories show, into the dialect that MkDocs reads.

Python-Markdown wants four spaces before what belongs to a list, and an empty line before each list.
"""

from typing import Any

import mdformat

from website.repository_pages import is_prose

EXTENSIONS = {"gfm", "mkdocs", "tables"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns a page that people wrote in MkDocs' dialect. Pages that are made for the site are in
    this dialect already."""
    if not is_prose(page.file.src_uri):
        return markdown
    text: str = mdformat.text(markdown, options={"wrap": "keep"}, extensions=EXTENSIONS)
    return text
