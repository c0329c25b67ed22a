"""The JSON schema of receipts, `docs/receipt.schema.json`, made from `services.receipts.receipt`.

`python -m tests.receipts.schema_file` writes it.
"""

import json
from pathlib import Path

from services.receipts.receipt import Receipt

FILE = Path(__file__).parents[2] / "docs" / "receipt.schema.json"
COMMAND = "python -m tests.receipts.schema_file"


def content() -> str:
    """Returns the schema as it should be in the file."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(schema | Receipt.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(content(), encoding="utf-8")
