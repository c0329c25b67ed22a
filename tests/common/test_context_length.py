"""The length of the context, as the files of a checkpoint state it."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.context_length import context_length, default_context


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024, "n_ctx": 512}, 1024),
        ({"text_config": {"max_position_embeddings": 131072}}, 131072),
        ({"max_position_embeddings": None, "text_config": {"seq_length": 9}}, 9),
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"text_config": [1]}, None),
        ([], None),
        ({}, None),
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "rope_parameters": {"rope_theta": 500.0},
            },
            16384,
        ),
    ],
    ids=str,
)
def test_the_length_is_read_from_the_configuration(
    tmp_path: Path, config: Any, expected: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(tmp_path) == expected


def test_without_files_there_is_no_length(tmp_path: Path) -> None:
    assert context_length(tmp_path) is None
    assert context_length(tmp_path / "none") is None
    (tmp_path / "config.json").write_text("{")
    assert context_length(tmp_path) is None


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "longrope"}, 4096),
        ({"rope_type": "su", "original_max_position_embeddings": 2048}, 4096),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 131072}, 262144),
        ({}, 131072),
    ],
)
def test_longrope_is_served_in_its_original_context(rope: dict[str, Any], expected: int) -> None:
    config = {"max_position_embeddings": 131072, "rope_scaling": rope}
    original = {"original_max_position_embeddings": 4096} if expected == 4096 else {}
    assert default_context({**config, **original}) == expected
    assert default_context({}) is None
