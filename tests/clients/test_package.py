"""The client package needs nothing of ours, and little of others."""

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from orcinus_client import errors

PACKAGE = Path(__file__).parents[2] / "clients" / "python" / "orcinus_client"


def imported(paths: Iterable[Path]) -> set[str]:
    """The packages that files import, those of Python itself left out."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names


def test_the_client_imports_nothing_of_the_services() -> None:
    over_grpc = set(PACKAGE.glob("grpc*.py"))
    over_http = imported(set(PACKAGE.glob("*.py")) - over_grpc)
    assert over_http == {"httpx", "opentelemetry", "orcinus_client"}
    assert imported(over_grpc) == {"google", "grpc", "orcinus_client"}


def test_its_page_names_the_statuses_of_each_error() -> None:
    page = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    named = {
        (kind, int(status))
        for kinds, statuses in re.findall(r"^\| (`.*?) \| ([\d, ]+) \|", page, re.MULTILINE)
        for kind, status in zip_kinds(kinds, statuses)
    }
    raised = {(kind.__name__, status) for status, kind in errors.STATUSES.items()}
    assert named == {*raised, ("UnexpectedAnswer", 200)}


def zip_kinds(kinds: str, statuses: str) -> list[tuple[str, str]]:
    """Several kinds have a status each; one has all of them."""
    names, numbers = re.findall(r"`(\w+)`", kinds), statuses.split(", ")
    return list(zip(names if len(names) > 1 else names * len(numbers), numbers, strict=True))
