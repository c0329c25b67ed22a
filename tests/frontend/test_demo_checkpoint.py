"""The checkpoint in the box, as far as a conversation is concerned."""

import json
from pathlib import Path

import tokenizers

from services.frontend.request.conversation import ChatMessage, Conversation
from services.frontend.text.chat_template import ChatTemplate

DEMO = Path(__file__).parents[2] / "models" / "demo"


def test_whatever_begins_a_turn_ends_the_answer() -> None:
    template = ChatTemplate.from_directory(DEMO)
    assert template is not None
    said = Conversation((ChatMessage("user", "a"), ChatMessage("assistant", "b")))
    written = template.render(said, limit_s=1.0, max_characters=1000)
    encoding = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(
        written, add_special_tokens=False
    )
    begin, *special = [
        i for i, token in zip(encoding.ids, encoding.tokens, strict=True) if token[:2] == "<|"
    ]
    config = json.loads((DEMO / "generation_config.json").read_text(encoding="utf-8"))
    assert config["bos_token_id"] == begin
    assert set(config["eos_token_id"]) == set(special)
