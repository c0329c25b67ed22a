"""The client package needs nothing of ours, and little of others."""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "clients" / "python" / "orcinus_client"


def test_the_client_imports_nothing_of_the_services() -> None:
    imported = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names == {"httpx", "opentelemetry", "orcinus_client"}
