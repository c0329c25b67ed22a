"""The JSON schema of receipts, `docs/receipt.schema.json`, made from `services.receipts.receipt`.

`python -m tests.receipts.schema_file` writes it.
"""

import ast
import inspect
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from services.receipts import receipt

FILE = Path(__file__).parents[2] / "docs" / "receipt.schema.json"
COMMAND = "python -m tests.receipts.schema_file"


def content() -> str:
    """Returns the schema as it should be in the file."""
    schema = receipt.Receipt.model_json_schema()
    described = attribute_docstrings(inspect.getsource(receipt))
    for form in (schema, *schema["$defs"].values()):
        for name, text in described.get(form["title"], {}).items():
            form["properties"][name] = {"description": text, **form["properties"][name]}
    dialect: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(dialect | schema, indent=2, ensure_ascii=False) + "\n"


def attribute_docstrings(source: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings of the attributes of each class, by class and attribute.

    Pydantic could read them, but at every start of a frontend, where it takes a fifth of a second.
    """
    return {
        node.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in pairwise(node.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
