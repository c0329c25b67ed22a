"""Gives each file of the repository that a page links to a page of the site."""

from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

from website import repository_pages as pages


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages of all files outside `docs` that a page links to."""
    docs = [file.src_uri for file in files.documentation_pages() if not file.generated_by]
    linked = pages.linked_files([*(pages.DOCS + uri for uri in docs), *pages.PAGES])
    for path in sorted(linked | set(pages.PAGES)):
        level = InclusionLevel.INCLUDED if path in pages.PAGES else InclusionLevel.NOT_IN_NAV
        text = pages.page_of(path, linked)
        files.append(File.generated(config, pages.site_path(path), content=text, inclusion=level))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns the page with links to files outside `docs` changed to their pages."""
    uri = page.file.src_uri
    if not pages.is_prose(uri):
        return markdown
    is_source = uri.startswith(pages.SOURCE)
    return pages.adapted(
        markdown, uri.removeprefix(pages.SOURCE) if is_source else pages.DOCS + uri
    )
