"""Tokens that only the files beside `tokenizer.json` name, as `transformers` reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from services.common.derived import Derived
from services.common.tokenizer_files.end_token import end_token
from services.common.tokenizer_files.find import read_tokenizer
from services.frontend.text.tokenizer import Tokenizer

TEXT = "x<a><b><c><d> ."

Json = dict[str, Any]


def token(text: str, *, special: bool) -> Json:
    return {
        "content": text, "special": special, "lstrip": False, "rstrip": False,
        "normalized": False, "single_word": False,
    }  # fmt: skip


A, B, SPECIAL_A, SPECIAL_B = (
    token(text, special=special) for special in (False, True) for text in ("<a>", "<b>")
)


def write(directory: Path, added: list[Json], **files: Json) -> Path:
    """Writes a tokenizer of 256 bytes and the tokens `added`, and JSON files beside it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    content = json.loads(made.to_str())
    content["added_tokens"] = [{"id": 256 + i, **each} for i, each in enumerate(added)]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


CASES: dict[str, tuple[list[Json], dict[str, Json]]] = {
    "listed": (
        [SPECIAL_A],
        {"tokenizer_config": {"added_tokens_decoder": {
            "256": SPECIAL_A, "257": B, "258": token("<c>", special=True)}}},
    ),
    "listed-as-special": (
        [SPECIAL_A, B],
        {"tokenizer_config": {"added_tokens_decoder": {"256": SPECIAL_A, "257": SPECIAL_B}}},
    ),
    "listed-as-plain": (
        [SPECIAL_A, SPECIAL_B],
        {"tokenizer_config": {"added_tokens_decoder": {"256": SPECIAL_A, "257": B}}},
    ),
    "listed-by-another-number": (
        [SPECIAL_A, B],
        {"tokenizer_config": {"eos_token": "<a>", "added_tokens_decoder": {"300": SPECIAL_A}}},
    ),
    "named": ([A, SPECIAL_B], {"tokenizer_config": {"eos_token": "<a>"}}),
    "named-as-object": ([A], {"tokenizer_config": {"eos_token": {"__type": "AddedToken", **A}}}),
    "named-and-listed-as-plain": (
        [A], {"tokenizer_config": {"pad_token": "<a>", "added_tokens_decoder": {"256": A}}},
    ),
    "named-and-new": ([SPECIAL_B], {"tokenizer_config": {"eos_token": "<a>"}}),
    "named-in-the-vocabulary": ([], {"tokenizer_config": {"eos_token": "x"}}),
    "named-by-the-model": ([A], {"tokenizer_config": {"image_token": "<a>", "t_token": "<d>"}}),
    "further": (
        [A, SPECIAL_B], {"tokenizer_config": {"additional_special_tokens": ["<a>", "<d>"]}},
    ),
    "extra": ([A, SPECIAL_B], {"tokenizer_config": {"extra_special_tokens": ["<a>", "<d>"]}}),
    "extra-named": (
        [A, SPECIAL_B],
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<a>", "x_token": "<d>"}}},
    ),
    "map": ([A], {"tokenizer_config": {}, "special_tokens_map": {"eos_token": "<a>"}}),
    "map-and-list": (
        [A],
        {"tokenizer_config": {"added_tokens_decoder": {"256": A}},
         "special_tokens_map": {"eos_token": "<a>"}},
    ),
    "added": (
        [SPECIAL_A], {"tokenizer_config": {"eos_token": "<c>"},
                      "added_tokens": {"<b>": 257, "<c>": 258}},
    ),
    "none": ([A, SPECIAL_B], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    added, files = CASES[case]
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **files.get("tokenizer_config", {})}
    write(tmp_path, added, **{**files, "tokenizer_config": named})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    tokens = theirs.encode(TEXT, add_special_tokens=False)
    assert list(ours.to_tokens(TEXT, add_special_tokens=False)) == tokens
    assert ours.to_text(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    whole = read_tokenizer(tmp_path / "tokenizer.json")
    assert LLTokenizer(whole).vocab_size == len(theirs)
    end = end_token(tmp_path)
    assert (end and end.value) == theirs.eos_token_id


def test_an_end_names_its_file(tmp_path: Path) -> None:
    files = {"special_tokens_map": {"eos_token": "<b>"}, "tokenizer_config": {"eos_token": "<a>"}}
    write(tmp_path, [A, B], **files)
    assert end_token(tmp_path) == Derived(257, "special_tokens_map.json: eos_token <b>")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"added_tokens_decoder": {"260": B}}, "'<b>', .* cannot be the token 260: .* is 257"),
        ({"added_tokens_decoder": {"256": B}}, "'<b>', .* cannot be the token 256: .* is 257"),
        ({"added_tokens_decoder": {"-1": B}}, "'-1' is no number"),
        ({"added_tokens_decoder": {"x": B}}, "'x' is no number"),
        ({"added_tokens_decoder": [B]}, "added_tokens_decoder is no object"),
        ({"added_tokens_decoder": {"257": "<b>"}}, r"added_tokens_decoder\.257 is no object"),
        ({"added_tokens_decoder": {"257": {}}}, "has no text"),
        ({"eos_token": {"content": 5}}, "has no text"),
        ({"additional_special_tokens": [5]}, "has no text"),
    ],
)
def test_tokens_that_cannot_be_are_refused(tmp_path: Path, config: Json, named: str) -> None:
    write(tmp_path, [A], tokenizer_config=config)
    with pytest.raises(ValueError, match=named):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"added_tokens": 5}, "added_tokens is no list"),
        ({"added_tokens": [5]}, "5 in added_tokens is no token"),
        ({"added_tokens": [{"id": 1}]}, "in added_tokens is no token"),
        ({"added_tokens": [{"id": "y", "content": "<a>"}]}, "'y' is no number"),
        ({"model": {"vocab": 5}}, "has no vocabulary"),
        ({"model": {"vocab": {"<a>": []}}}, "is no number"),
    ],
)
def test_a_broken_tokenizer_is_refused_by_name(tmp_path: Path, change: Json, named: str) -> None:
    path = write(tmp_path, [], tokenizer_config={"eos_token": "<a>"}) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    for read in (Tokenizer.from_directory, end_token):
        with pytest.raises(ValueError, match=named):
            read(tmp_path)


def test_an_empty_name_and_an_empty_list_name_nothing(tmp_path: Path) -> None:
    config = {"bos_token": "", "eos_token": "<a>", "added_tokens_decoder": None}
    directory = write(tmp_path, [], tokenizer_config=config)
    added = json.loads(read_tokenizer(directory / "tokenizer.json"))["added_tokens"]
    assert [(one["content"], one["id"]) for one in added] == [("<a>", 256)]


def test_many_tokens_are_added_in_no_time(tmp_path: Path) -> None:
    """The number of the next token is kept. To find it anew for each token would take minutes."""
    n = 20_000
    decoder = {str(256 + i): token(f"<{i}>", special=False) for i in range(n)}
    directory = write(tmp_path, [], tokenizer_config={"added_tokens_decoder": decoder})
    assert len(json.loads(read_tokenizer(directory / "tokenizer.json"))["added_tokens"]) == n
