"""The pages that the site has for files of the repository outside `docs`.

In the repository a link such as `../services/worker` leads to a folder beside `docs`, which the
site does not have. The site has the page `source/services/worker/files.md` instead. Pages in
Markdown, such as the README, are shown as pages, other files as source code, and folders as a list
of their files. Paths are relative to the root of the repository.
"""

import ast
import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS, SOURCE = "docs/", "source/"
FOLDER_PAGE = "files.md"
LINK = re.compile(r"(?<=\]\()(?!\w+:|[#/<])([^)\s#]+)(?=[)#])")
LANGUAGES: Mapping[str, str] = {
    ".py": "python",
    ".proto": "protobuf",
    ".cpp": "cpp",
    ".h": "cpp",
    ".toml": "toml",
    ".yaml": "yaml",
    ".sh": "bash",
    ".md": "markdown",
}
"""Languages of source code, by the suffix of the file. Folders show files of these kinds alone."""
PAGES = ("README.md", "CHANGELOG.md", "SECURITY.md", "clients/python/README.md")
"""Pages outside `docs` that the navigation names."""

FRONT_MATTER = "---\nsearch: {exclude: true}\nhide: [navigation]\n---\n\n"


def is_prose(uri: str) -> bool:
    """Returns whether people wrote a page of the site: a page of `docs` or another one of the
    repository, and neither a page of reference nor one of source code."""
    path = Path(uri)
    return path.parts[0] != "reference" and "." not in path.stem and path.name != FOLDER_PAGE


def linked_files(pages: Iterable[str]) -> set[str]:
    """Returns the paths outside `docs` that the pages link to, and those that these lead to: what a
    page in Markdown links to, and the files of a folder. Paths are relative to the repository."""
    found: set[str] = set()
    waiting = list(pages)
    while waiting:
        path = waiting.pop()
        targets = {target for target in leads_to(path) if not target.startswith(DOCS)} - found
        found |= targets
        waiting += targets
    return found


def leads_to(path: str) -> list[str]:
    """Returns the existing paths that a page, or the page of a folder, links to."""
    if (ROOT / path).is_dir():
        return [f"{path}/{name}" for name in file_names(path)]
    if not path.endswith(".md"):
        return []
    text = (ROOT / path).read_text(encoding="utf-8")
    targets = (target_of(link, path) for link in LINK.findall(text))
    return [target for target in targets if (ROOT / target).exists()]


def file_names(folder: str) -> list[str]:
    """Returns the names of a folder's files of known languages, in alphabetical order."""
    files = (file for file in (ROOT / folder).iterdir() if file.suffix in LANGUAGES)
    return sorted(file.name for file in files if file.name != "__init__.py")


def folder_names(folder: str) -> list[str]:
    """Returns the names of the packages of Python in a folder, in alphabetical order."""
    return sorted(path.parent.name for path in (ROOT / folder).glob("*/__init__.py"))


def adapted(markdown: str, path: str) -> str:
    """Returns the text of the page at `path` of the repository with the links of the site."""

    def link(match: re.Match[str]) -> str:
        target = target_of(match[1], path)
        if not (ROOT / target).exists():
            return match[1]
        return posixpath.relpath(site_path(target), posixpath.dirname(site_path(path)) or ".")

    return LINK.sub(link, markdown)


def target_of(link: str, path: str) -> str:
    """Returns the path in the repository that a link of the page at `path` leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def site_path(path: str) -> str:
    """Returns where the site has the page, or the image, of a path of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if (ROOT / path).is_dir():
        return f"{SOURCE}{path}/{FOLDER_PAGE}"
    return SOURCE + path if path.endswith(".md") else f"{SOURCE}{path}.md"


def page_of(path: str, linked: set[str]) -> str:
    """Returns the page of a file or a folder in Markdown."""
    if (ROOT / path).is_dir():
        return folder_page(path, linked)
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f'{FRONT_MATTER}# `{path}`\n\n~~~~~~{{.{language} linenums="1"}}\n{text}\n~~~~~~\n'


def folder_page(path: str, linked: set[str]) -> str:
    """Returns the page of a folder: its purpose, and its files and folders with the purpose of
    each. Folders have links if they have a page."""
    rows = []
    for folder in folder_names(path):
        is_linked = f"{path}/{folder}" in linked
        name = f"[`{folder}/`]({folder}/{FOLDER_PAGE})" if is_linked else f"`{folder}/`"
        rows.append((name, purpose(f"{path}/{folder}", "__init__.py")))
    for file in file_names(path):
        page = posixpath.basename(site_path(f"{path}/{file}"))
        rows.append((f"[`{file}`]({page})", purpose(path, file)))
    table = "".join(f"| {name} | {text} |\n" for name, text in rows)
    about = purpose(path, "__init__.py")
    return f"{FRONT_MATTER}# `{path}`\n\n{about}\n\n| file | purpose |\n| --- | --- |\n{table}"


def purpose(folder: str, name: str) -> str:
    """Returns the first paragraph of a module's docstring, or an empty text if it has none."""
    file = ROOT / folder / name
    if file.suffix != ".py" or not file.exists():
        return ""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
