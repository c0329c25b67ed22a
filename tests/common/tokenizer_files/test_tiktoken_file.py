"""Kimi's `tiktoken.model`, against the library `tiktoken`."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken

from services.common.tokenizer_files.find import default_roles, tokenizer_file
from services.frontend.text.tokenizer import Tokenizer
from tests.common.tokenizer_files.strange_texts import STRANGE
from tests.common.tokenizer_files.tekken_file import TOKENS

# As the program beside the file spells it.
PATTERN = "|".join([
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
])  # fmt: skip
N = len(TOKENS)
NAMED = {"[BOS]": N, "[EOS]": N + 1, "<|im_end|>": N + 2}


def write(directory: Path, lines: bytes | None = None) -> None:
    if lines is None:
        ranks = enumerate(TOKENS)
        lines = b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in ranks)
    (directory / "tiktoken.model").write_bytes(lines)
    added = {str(token_id): {"content": text, "special": True} for text, token_id in NAMED.items()}
    said = {"added_tokens_decoder": added, "tokenizer_class": "TikTokenTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps(said))
    (directory / "config.json").write_text('{"model_type": "kimi_k2"}')


def test_texts_have_the_tokens_of_tiktoken(tmp_path: Path) -> None:
    write(tmp_path)
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    oracle = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=NAMED)
    ours = Tokenizer.from_directory(tmp_path)
    for text in [*STRANGE, "中文English中文THEY'RE Ünïcode漢字 the"]:
        tokens = ours.to_tokens(text)
        assert list(tokens) == oracle.encode(text, allowed_special="all"), text
    text = "the[EOS]<|im_end|>"
    assert ours.to_tokens(text)[-2:] == (N + 1, N + 2)
    assert ours.to_text(ours.to_tokens(text)) == "the"


def test_special_tokens_have_their_places(tmp_path: Path) -> None:
    write(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    reserved = f"<|reserved_token_{N + 255}|>"
    assert ours.special_tokens([*NAMED, reserved]) == {**NAMED, reserved: N + 255}
    roles = default_roles(tokenizer_file(tmp_path))
    assert roles == {"bos_token": "[BOS]", "eos_token": "[EOS]"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "has 0 lines"),
        (b"YQ== 1\n", "line 1 has no rank 0"),
        (b"YQ==\n", "line 1 has no rank 0"),
        (b"! 0\n", "line 1 is not base64"),
        (b"YQ== 0\nYQ== 1\n", "has a token twice"),
    ],
    ids=["empty", "rank", "alone", "base64", "twice"],
)
def test_what_is_wrong_is_named(tmp_path: Path, lines: bytes, message: str) -> None:
    write(tmp_path, lines)
    with pytest.raises(ValueError, match=f"{tmp_path}/tiktoken.model: {message}"):
        Tokenizer.from_directory(tmp_path)


def test_the_pattern_of_another_model_is_not_known(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen"}')
    with pytest.raises(ValueError, match="how qwen's tokenizer divides texts is in no file"):
        Tokenizer.from_directory(tmp_path)
