"""Where the templates of a checkpoint stand."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from services.frontend.text.template_files import DEFAULT, TEKKEN_PLACE, TemplateFiles
from tests.common.tokenizer_files.tekken_file import contents

CONFIG = "tokenizer_config.json: chat_template"
NAMED = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"tokenizer_config.json": {"chat_template": "a"}}, CONFIG),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, CONFIG),
        ({"chat_template.json": {"chat_template": "a"}}, "chat_template.json"),
        (
            {
                "tokenizer_config.json": {"chat_template": NAMED},
                "chat_template.json": {"chat_template": {"tool_use": "c"}},
            },
            CONFIG,
        ),
        (
            {"tokenizer_config.json": {"chat_template": "a"}, "chat_template.jinja": "b"},
            "chat_template.jinja",
        ),
        (
            {"additional_chat_templates/default.jinja": "a"},
            "additional_chat_templates/default.jinja",
        ),
        ({"tekken.json": contents()}, TEKKEN_PLACE),
        (
            {"tekken.json": contents(), "tokenizer_config.json": {"chat_template": "a"}},
            CONFIG,
        ),
    ],
    ids=[
        "config", "named", "json", "json-without-default", "jinja", "additional", "tekken",
        "tekken-config",
    ],
)  # fmt: skip
def test_the_place_of_the_template_is_the_file_that_it_was_read_from(
    tmp_path: Path, files: dict[str, Any], place: str
) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    found = TemplateFiles.of_model(tmp_path)
    assert found.places[DEFAULT] == place
    assert found.places.keys() == found.sources.keys()


def test_the_place_in_a_gguf_file_is_a_key(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_chat_template(NAMED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = TemplateFiles.of_model(path)
    assert found.sources == {"default": "a", "tool_use": "b"}
    assert found.places == {
        "default": "m.gguf: tokenizer.chat_template",
        "tool_use": "m.gguf: tokenizer.chat_template.tool_use",
    }
