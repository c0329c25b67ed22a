"""Prompts and lengths of vectors, as a checkpoint's files declare them."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.frontend.request.vector_defaults import PROMPTS_FILE, VectorDefaults


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
