"""Fuzzing target: tokenizer files and, for each file that can be read, short texts."""

import json
import tempfile
from pathlib import Path

from services.frontend.text.incremental_text import IncrementalText
from services.frontend.text.tokenizer import Tokenizer
from tests.fuzz.coverage.target import Choices, Target, any_bytes

FILE = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    ],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend",
                   "prepend": "_"}]},
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\w+|[^\\w\\s]+"},
                      "behavior": "Isolated", "invert": False},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>",
                       "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                       "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": "<s>", "byte_fallback": False,
              "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3, "_": 4}, "merges": [["a", "b"]]},
}  # fmt: skip
KINDS = ("BPE", "Unigram", "WordPiece", "WordLevel", "ByteLevel", "Metaspace", "Replace", "Strip",
         "Fuse", "Sequence", "ByteFallback", "Precompiled", "BertNormalizer", "Digits", "CTC",
         "TemplateProcessing", "Split", "Truncate", "Lowercase")  # fmt: skip
TEKKEN = {
    "config": {"pattern": "\\w+|\\W", "default_vocab_size": 6, "default_num_special_tokens": 3,
               "version": "v11"},
    "vocab": [{"token_bytes": text} for text in ("YQ==", "Yg==", "YWI=")],
    "special_tokens": [{"rank": rank, "token_str": text}
                       for rank, text in enumerate(("<unk>", "<s>", "</s>"))],
}  # fmt: skip
VOCABULARY = {"a": 0, "b": 1, "ab": 2}
BESIDE = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "eos_token": {"content": "ab"},
          "added_tokens_decoder": {"3": {"content": "<s>", "special": True}}}  # fmt: skip
PIECES = b"\x0a\x05\x0a\x01a\x18\x01\x0a\x05\x0a\x01b\x18\x01\x12\x05\x18\x02\x98\x02\x01"
"""A SentencePiece model of two pieces."""

_DIRECTORY = tempfile.TemporaryDirectory()


def run(data: bytes) -> None:
    """Takes bytes as a file, or changes a file by them; a tokenizer that is read is used."""
    choices = Choices(data)
    content = data[1:]
    for name in ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json"):
        Path(_DIRECTORY.name, name).unlink(missing_ok=True)
    if kind := choices.number(4):
        _write_other(kind, choices, content)
        return _use(Path(_DIRECTORY.name))
    if choices.number(4):
        file = choices.changed(FILE, tuple(FILE))
        part = choices.one_of([value for value in file.values() if isinstance(value, dict)] or [{}])
        if choices.number(2):
            part["type"] = choices.one_of(KINDS)
        content = json.dumps(file).encode()
    path = Path(_DIRECTORY.name, "tokenizer.json")
    path.write_bytes(content)
    return _use(path.parent)


def _write_other(kind: int, choices: Choices, content: bytes) -> None:
    """Writes a file of another form, by its number."""
    directory = Path(_DIRECTORY.name)
    if kind == 1:
        said = json.dumps(choices.changed(TEKKEN, tuple(TEKKEN)))
        (directory / "tekken.json").write_text(said)
    elif kind == 2:
        place = choices.number(len(PIECES))
        (directory / "tokenizer.model").write_bytes(PIECES[:place] + content[:4] + PIECES[place:])
    else:
        (directory / "vocab.json").write_text(json.dumps(choices.changed(VOCABULARY, ("a", "b"))))
        (directory / "merges.txt").write_bytes(b"a b\n" + content[: 4 * choices.number(2)])
        said = json.dumps(choices.changed(BESIDE, tuple(BESIDE)))
        (directory / "tokenizer_config.json").write_text(said)


def _use(directory: Path) -> None:
    """Reads the tokenizer of a directory; one that can be read is used."""
    try:
        tokenizer = Tokenizer.from_directory(directory)
    except ValueError as error:
        assert str(directory) in str(error), error
        return
    tokens = tokenizer.to_tokens("ab a_b <s> é")
    text = IncrementalText(tokenizer)
    for token_id in tokens:
        text.feed(token_id)
    text.flush()


TARGET = Target(
    run=run,
    seeds=[
        *any_bytes(b"\1"),
        b"\0" + json.dumps(FILE).encode(),
        *(bytes([1, 0, field, case, 5]) for field in range(9) for case in (0, 2, 3)),
    ],
    words=[*(f'"{kind}"' for kind in KINDS), *(f'"{name}":' for name in FILE), '"vocab":{}'],
)  # fmt: skip
