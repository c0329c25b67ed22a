"""Whole checkpoints in each format that is served, as files in memory, made when first asked for.

All have the same tokenizer, which is as small as a byte-level one can be.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gguf import GGMLQuantizationType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.checkpoints import SMALL, write_checkpoint, write_family_checkpoint
from tests.ggufs import vocabulary, write_gguf
from tests.worker.models.quantised_writers import quantise
from tests.worker.models.test_quantised_checkpoints import SCHEMES, SIZES
from tests.worker.models.test_registry import SHAPES

Files = dict[str, bytes]

GGUF_FILE = "model.gguf"
VOCAB_SIZE = 264
ENDS = ["<s>", "</s>", "<|im_end|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TINY: dict[str, Any] = {**SMALL, "vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Original:
    """The files of a checkpoint, and of a plain one that means the same if this one is
    quantised."""

    files: Mapping[str, bytes]
    plain: Mapping[str, bytes] | None = None


def tokenizer() -> Tokenizer:
    """Returns a byte-level tokenizer of 256 bytes, two merges and three special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "th", "the"]
    made = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [("t", "h"), ("th", "e")])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(end, special=True) for end in ENDS])
    return made


def _texts() -> Files:
    config = {
        "bos_token": ENDS[0],
        "eos_token": {"__type": "AddedToken", "content": ENDS[1], "lstrip": False},
        "chat_template": TEMPLATE,
        "model_max_length": 256,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def _read(directory: Path) -> Files:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def _plain(directory: Path) -> Original:
    write_checkpoint(directory, **TINY)
    return Original(_read(directory) | _texts())


def _sharded(directory: Path) -> Original:
    write_checkpoint(directory, dtype=torch.bfloat16, max_shard_size="60KB", **TINY)
    return Original(_read(directory) | _texts())


def _family(config: Any) -> Callable[[Path], Original]:
    def make(directory: Path) -> Original:
        write_family_checkpoint(directory, config)
        return Original(_read(directory) | _texts())

    return make


def _quantised(scheme: str) -> Callable[[Path], Original]:
    def make(directory: Path) -> Original:
        plain, quantised = directory / "plain", directory / "quantised"
        write_checkpoint(plain, **{**TINY, **SIZES})
        quantise(plain, quantised, SCHEMES[scheme].writer, SCHEMES[scheme].config)
        generation = {"generation_config.json": (plain / "generation_config.json").read_bytes()}
        return Original(_read(quantised) | generation | _texts(), _read(plain))

    return make


def _gguf(kind: str, **config: Any) -> Callable[[Path], Original]:
    def make(directory: Path) -> Original:
        write_checkpoint(directory, **{**TINY, **config})
        said = vocabulary(json.loads(tokenizer().to_str()), pre="gpt-2")
        said["tokens"] += ENDS
        said["token_type"] += [3] * len(ENDS)
        for i in range(len(said["tokens"]), VOCAB_SIZE):
            said["tokens"].append(f"[PAD{i}]")
            said["token_type"].append(5)
        said |= {"bos_token_id": 258, "eos_token_id": 259, "chat_template": TEMPLATE}
        file = write_gguf(
            directory, directory / GGUF_FILE, kind=GGMLQuantizationType[kind], tokenizer=said
        )
        return Original({GGUF_FILE: file.read_bytes()})

    return make


_FAMILIES = {
    name: _family(config)
    for name, config in SHAPES.items()
    if "-" not in name and name != "phi3"  # whose context is shorter than the prompt
}
_FORMATS: Mapping[str, Callable[[Path], Original]] = {
    "plain": _plain,
    "sharded": _sharded,
    **{
        name: _quantised(name)
        for name in ("gptq-4-groups", "gptq-4-asymmetric-ordered", "awq", "packed-groups",
                     "packed-asymmetric-ordered", "int8-channels", "float8-channels",
                     "fp8-blocks", "fp8-tensor")
    },
    "gguf-f32": _gguf("F32"),
    "gguf-q8": _gguf("Q8_0", hidden_size=96, intermediate_size=64),
    "gguf-q4": _gguf("Q4_0", hidden_size=96, intermediate_size=64),
}  # fmt: skip

_MAKERS = {**_FAMILIES, **_FORMATS}
FORMATS, FAMILIES = tuple(_FORMATS), tuple(_FAMILIES)
"""Names of the checkpoints of one format each, and of one family each."""


def any_name(dice: Random) -> str:
    """Returns the name of a checkpoint: of a format in two cases of three."""
    return dice.choice(dice.choice((FORMATS, FORMATS, FAMILIES)))


@cache
def original(name: str) -> Original:
    """Returns a checkpoint by its name."""
    with TemporaryDirectory() as directory:
        return _MAKERS[name](Path(directory))
