"""Files of tokenizers, and short texts through those that can be read."""

import json
import tempfile
from pathlib import Path

from services.frontend.text.tokenizer import IncrementalText, Tokenizer
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
_DIRECTORY = tempfile.TemporaryDirectory()


def run(data: bytes) -> None:
    """Takes bytes as a file, or changes a file by them; a tokenizer that is read is used."""
    choices = Choices(data)
    content = data[1:]
    if choices.number(4):
        file = choices.changed(FILE, tuple(FILE))
        part = choices.one_of([value for value in file.values() if isinstance(value, dict)] or [{}])
        if choices.number(2):
            part["type"] = choices.one_of(KINDS)
        content = json.dumps(file).encode()
    path = Path(_DIRECTORY.name, "tokenizer.json")
    path.write_bytes(content)
    try:
        tokenizer = Tokenizer.from_directory(path.parent)
    except ValueError as error:
        assert str(path) in str(error), error
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
