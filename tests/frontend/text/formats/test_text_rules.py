"""Rules of strings that end with a mark."""

from collections.abc import ItemsView
from typing import Any

from services.frontend.request.json_schema.unenforced import Unenforced
from services.frontend.text.formats.grammar import Markers, ToolRule
from services.frontend.text.formats.rule_set import RuleSet
from services.frontend.text.formats.text_rules import MAX_COUNTED, TextRules

N_PROPERTIES = 5000


class Walked(dict[str, Any]):
    """A part of a schema that counts how often its members are walked through."""

    n_walks = 0

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self.n_walks += 1
        return super().items()


def test_a_schema_is_walked_once_for_all_keywords_that_are_not_enforced() -> None:
    properties = Walked(
        {f"p{number}": {"maxLength": MAX_COUNTED + 1} for number in range(N_PROPERTIES)}
    )
    tool = ToolRule("find", "arguments", {"type": "object", "properties": properties})
    rules = TextRules(RuleSet(), Markers({}), "</p>")
    for schema in properties.values():
        rules.of(schema, tool)
    assert properties.n_walks == 1
    assert list(tool.unenforced) == [
        Unenforced(("properties", name), "maxLength") for name in properties
    ]


def test_a_part_that_is_not_in_the_schema_counts_as_the_root() -> None:
    tool = ToolRule("find", "arguments")
    TextRules(RuleSet(), Markers({}), "</p>").of({"format": "email"}, tool)
    assert list(tool.unenforced) == [Unenforced((), "format")]
