"""Equal schemas are translated once, and little memory is kept."""

import json
from typing import Any

import pytest

from services.frontend.request.json_schema import translations
from services.frontend.request.json_schema.client_schema import ClientSchema
from services.frontend.request.json_schema.translation import Translation
from services.frontend.request.json_schema.translations import BYTES_PER_CHARACTER, Translations
from services.frontend.request.json_schema.work import WrongSchema


@pytest.fixture(name="n_translated")
def count_translations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets an entry for each schema that is translated."""
    seen: list[Any] = []

    def translate(schema: dict[str, Any], *, closes: bool) -> Translation:
        seen.append(schema)
        return Translation(schema, closes=closes)

    monkeypatch.setattr(translations, "Translation", translate)
    return seen


def translated(kept: Translations, schema: dict[str, Any], *, closes: bool = True) -> Any:
    return kept.of(schema, json.dumps(schema), closes=closes).enforced


def test_an_equal_schema_is_translated_once(n_translated: list[Any]) -> None:
    kept = Translations()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    first = translated(kept, schema)
    assert translated(kept, json.loads(json.dumps(schema))) is first
    assert len(n_translated) == 1
    assert translated(kept, schema, closes=False) != first
    assert len(n_translated) == 2


def test_the_same_tools_of_the_next_turn_are_not_translated_again(n_translated: list[Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "x-turn": "same"}}}
    parameters = json.dumps(schema)
    for number in range(2):
        turn = ClientSchema(dict(schema), f"tools.{number}", parameters=parameters)
        assert turn.enforced["properties"]["a"]["type"] == "integer"
    assert len(n_translated) == 1
    assert ClientSchema(dict(schema), "format").enforced  # of no tool
    assert len(n_translated) == 2


def test_the_least_recently_used_translations_are_dropped(n_translated: list[Any]) -> None:
    schemas = [{"const": f"{number:04}"} for number in range(4)]
    n_each = BYTES_PER_CHARACTER * len(json.dumps(schemas[0]))
    kept = Translations(max_bytes=3 * n_each)
    for number in (0, 1, 2, 0, 3, 0, 1):
        translated(kept, schemas[number])
    assert n_translated == [schemas[number] for number in (0, 1, 2, 3, 1)]


def test_a_schema_that_is_larger_than_all_of_them_is_not_kept(n_translated: list[Any]) -> None:
    kept = Translations(max_bytes=10)
    for _ in range(2):
        assert translated(kept, {"const": "long"}) == {"const": "long"}
    assert len(n_translated) == 2
    assert not kept._kept


def test_a_wrong_schema_is_refused_each_time() -> None:
    kept = Translations()
    for _ in range(2):
        with pytest.raises(WrongSchema):
            translated(kept, {"type": "objekt"})
