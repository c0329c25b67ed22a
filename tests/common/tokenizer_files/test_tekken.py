"""`tekken.json`, against `mistral-common` and, for single words, `tiktoken`'s rules by hand."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from services.common.tokenizer_files.tekken import tekken_version
from services.frontend.text.incremental_text import IncrementalText
from services.frontend.text.tokenizer import Tokenizer
from tests.common.tokenizer_files.strange_texts import STRANGE
from tests.common.tokenizer_files.tekken_file import N_SPECIAL, NAMES, contents

pytest.importorskip("mistral_common", reason="the locked mistral-common refuses this Python")

from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer


def write(directory: Path, said: dict[str, Any]) -> Tekkenizer:
    path = directory / "tekken.json"
    path.write_text(json.dumps(said))
    return Tekkenizer.from_file(path)


def old() -> dict[str, Any]:
    """A file of before version 11, which does not list its special tokens."""
    said = contents()
    del said["special_tokens"]
    said["config"]["version"] = "v3"
    return said


@pytest.mark.parametrize(
    "said", [contents(), contents(n_vocab=300), old()], ids=["v11", "fewer", "old"]
)
def test_texts_have_the_tokens_of_mistral_common(tmp_path: Path, said: dict[str, Any]) -> None:
    oracle = write(tmp_path, said)
    ours = Tokenizer.from_directory(tmp_path)
    for text in STRANGE:
        if "<s>" in text:
            continue  # the oracle takes special tokens by their numbers alone
        expected = oracle.encode(text, bos=True, eos=False)
        assert list(ours.to_tokens(text)) == expected, text
        streamed = IncrementalText(ours)
        pieces = [streamed.feed(token) for token in expected]
        assert "".join(pieces) + streamed.flush() == oracle.decode(
            expected, special_token_policy=SpecialTokenPolicy.IGNORE
        )


def test_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    oracle = write(tmp_path, contents())
    ours = Tokenizer.from_directory(tmp_path)
    text = "[INST]a[/INST]b[TOOL_CALLS]f[ARGS]{}</s><SPECIAL_29>"
    tokens = ours.to_tokens(text, add_special_tokens=False)
    assert tokens[0] == oracle.get_special_token("[INST]")
    assert tokens[-2:] == (2, 29)
    assert ours.to_text(tokens) == "abf{}"
    assert ours.with_special_tokens.to_text(tokens) == text
    assert ours.special_tokens([*NAMES, "a"]) == {name: rank for rank, name in enumerate(NAMES)}


def test_a_word_that_is_a_token_is_not_merged(tmp_path: Path) -> None:
    """Merges would make other tokens of this word: `ab` comes first, and nothing joins `ab` and
    `c`."""
    said = contents()
    said["vocab"] = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(
            [*(bytes([one]) for one in range(256)), b"ab", b"bcd", b"abcd"]
        )
    ]
    said["config"]["default_vocab_size"] = 259 + N_SPECIAL
    oracle = write(tmp_path, said)
    ours = Tokenizer.from_directory(tmp_path)
    for text in ("abcd", "abcdab", "zabcd bcd"):
        assert list(ours.to_tokens(text)) == oracle.encode(text, bos=True, eos=False)


@pytest.mark.parametrize(
    ("said", "version"),
    [("v3", 3), ("v7m1", 7), ("v11", 11), ("v13", 13)],
    ids=lambda one: str(one),
)
def test_the_version_is_a_number(tmp_path: Path, said: str, version: int) -> None:
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps({"config": {"version": said}}))
    assert tekken_version(path) == version


def config(**changes: object) -> dict[str, Any]:
    said = contents()
    return {**said, "config": {**said["config"], **changes}}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no config": ({"vocab": []}, "config"),
    "few": (config(default_vocab_size=9999), "vocab has .* tokens, and the model"),
    "no pattern": ({**contents(), "config": {}}, "tekken.json"),
    "many special": (config(default_num_special_tokens=3), "special_tokens are 7, of 3"),
    "rank": (contents(special_tokens=[{"rank": 900, "token_str": "<s>"}]), "rank out of range"),
    "twice": (contents(special_tokens=[{"rank": i, "token_str": "<s>"} for i in (0, 1)]), "twice"),
    "no start": (contents(special_tokens=[]), "<s>"),
    "base64": (contents(vocab=[{"token_bytes": "!"}] * 400), "not base64"),
    "same": (contents(vocab=[{"token_bytes": "YQ=="}] * 400), "token twice"),
    "number": (config(default_vocab_size="x"), "tekken.json"),
    "pattern": (config(pattern="("), "is broken"),
}


@pytest.mark.parametrize(("said", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(tmp_path)
