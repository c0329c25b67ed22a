"""Prompts and lengths of vectors, as a checkpoint's files declare them."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.frontend.generation.vector_requests import embedding_request, vector_options
from services.frontend.request.text_parts import TextParts
from services.frontend.request.texts_field import TextsField
from services.frontend.request.vector_defaults import PROMPTS_FILE, TEXTS_FILE, VectorDefaults


def read(directory: Path, *, texts: Any = None, config: Any = None) -> VectorDefaults:
    for name, content in ((PROMPTS_FILE, texts), ("config.json", config)):
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    return VectorDefaults.from_directory(directory)


def test_a_default_prompt_is_used_if_the_client_names_none(tmp_path: Path) -> None:
    texts = {"prompts": {"query": "Q: ", "document": "D: "}, "default_prompt_name": "document"}
    defaults = read(tmp_path, texts=texts)
    assert [defaults.text_before(name) for name in (None, "query")] == ["D: ", "Q: "]
    with pytest.raises(InvalidRequest, match=r"prompt_name: .* 'document' and 'query'"):
        defaults.text_before("poem")


def test_without_files_nothing_goes_before_texts(tmp_path: Path) -> None:
    defaults = read(tmp_path)
    assert defaults.text_before(None) == ""
    with pytest.raises(InvalidRequest, match="the model has none"):
        defaults.text_before("query")


def test_texts_become_lower_case_where_the_files_say_so(tmp_path: Path) -> None:
    assert read(tmp_path).lowered("A Lien") == "A Lien"
    file = tmp_path / TEXTS_FILE
    file.write_text(json.dumps({"max_seq_length": 512, "do_lower_case": True}))
    assert read(tmp_path).lowered("A Lien") == "a lien"
    file.write_text(json.dumps({"do_lower_case": "yes"}))
    with pytest.raises(ValueError, match="do_lower_case"):
        read(tmp_path)


def test_a_prompt_and_a_text_become_lower_case_together() -> None:
    defaults = VectorDefaults(prompts={"query": "Query: "}, lowers=True)
    request = embedding_request(
        ["A Lien", (5, 6)],
        vector_options(),
        defaults=defaults,
        prompt_name="query",
        model="",
        field=TextsField("input"),
    )
    text, tokens = request.prompts
    assert isinstance(text, TextParts)
    assert (text.text, tokens) == ("query: a lien", (5, 6))


@pytest.mark.parametrize(
    ("config", "allowed", "refused"),
    [
        ({}, {8}, {0, 4, 9}),
        ({"is_matryoshka": True}, {1, 4, 8}, {0, -1, 9}),
        ({"matryoshka_dimensions": [2, 4]}, {2, 4, 8}, {1, 3, 9}),
        ({"matryoshka_dimensions": [2, 16], "is_matryoshka": True}, {2, 8}, {4, 16}),
    ],
)
def test_vectors_are_cut_to_declared_lengths(
    tmp_path: Path, config: dict[str, Any], allowed: set[int], refused: set[int]
) -> None:
    defaults = read(tmp_path, config=config)
    for length in allowed:
        defaults.check_length(length, whole=8)
    for length in refused:
        with pytest.raises(InvalidRequest, match="dimensions: must be"):
            defaults.check_length(length, whole=8)


@pytest.mark.parametrize(
    ("texts", "config", "message"),
    [
        ({"prompts": ["Q: "]}, None, "prompts are not texts"),
        ({"prompts": {"query": 3}}, None, "prompts are not texts"),
        ({"default_prompt_name": "query"}, None, "default_prompt_name"),
        (None, {"matryoshka_dimensions": ["8"]}, "matryoshka_dimensions"),
        (None, {"matryoshka_dimensions": [8, 0]}, "matryoshka_dimensions"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, texts: Any, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, texts=texts, config=config)
