"""Whole checkpoints in each format that is served, as files in memory, made when first asked for.

All have the same tokenizer, which is as small as a byte-level one can be.
"""

import copy
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
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.checkpoints import SMALL, edit_config, write_checkpoint, write_family_checkpoint
from tests.common.tokenizer_files import tekken_file
from tests.common.tokenizer_files.test_sentence_piece import UNIGRAM
from tests.common.tokenizer_files.test_sentence_piece import write as write_pieces
from tests.ggufs import vocabulary, write_gguf
from tests.worker.models.quantised_writers import quantise
from tests.worker.models.test_gguf_architectures import CONFIGS as ARCHITECTURES
from tests.worker.models.test_published_formats import FORMATS as PUBLISHED
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
    quantised.

    With `has_oracle` false, `transformers` does not read the files. Then an answer that is not the
    whole checkpoint's is not judged, but there must be no other end than an answer or a refusal.
    """

    files: Mapping[str, bytes]
    plain: Mapping[str, bytes] | None = None
    has_oracle: bool = True


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


_PUBLISHED_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}


def _published(name: str) -> Callable[[Path], Original]:
    def make(directory: Path) -> Original:
        plain, quantised, form = directory / "plain", directory / "quantised", PUBLISHED[name]
        write_checkpoint(plain, **{**TINY, **_PUBLISHED_SIZES})
        quantise(plain, quantised, form.writer, {})
        edit_config(quantised, remove=("quantization_config",), **{form.key: dict(form.config)})
        generation = {"generation_config.json": (plain / "generation_config.json").read_bytes()}
        return Original(_read(quantised) | generation | _texts(), _read(plain))

    return make


def _pickled(directory: Path) -> Original:
    write_checkpoint(directory, **TINY)
    file = directory / "model.safetensors"
    torch.save(load_file(file), directory / "pytorch_model.bin")
    file.unlink()
    return Original(_read(directory) | _texts())


def _tekken() -> Files:
    return {"tekken.json": json.dumps(tekken_file.contents()).encode()}


def _sentence_piece() -> Files:
    with TemporaryDirectory() as directory:
        write_pieces(Path(directory), UNIGRAM)
        return {"tokenizer.model": (Path(directory) / "tokenizer.model").read_bytes()}


def _words_and_merges() -> Files:
    said = json.loads(tokenizer().to_str())
    pairs = [" ".join(pair) for pair in said["model"]["merges"]]
    words = said["model"]["vocab"] | {each["content"]: each["id"] for each in said["added_tokens"]}
    return {
        "vocab.json": json.dumps(words).encode(),
        "merges.txt": "\n".join(["#version: 0.2", *pairs]).encode(),
        "tokenizer_config.json": b'{"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}',
    }


def _with_texts(texts: Callable[[], Files]) -> Callable[[Path], Original]:
    def make(directory: Path) -> Original:
        write_checkpoint(directory, **TINY)
        return Original(_read(directory) | texts(), has_oracle=False)

    return make


def _gguf_of(name: str, n_files: int = 1) -> Callable[[Path], Original]:
    def make(directory: Path) -> Original:
        config = copy.deepcopy(ARCHITECTURES[name])
        config.vocab_size = VOCAB_SIZE
        write_family_checkpoint(directory, config)
        write_gguf(directory, directory / GGUF_FILE, tokenizer=_gguf_words(), n_files=n_files)
        files = {path.name: path.read_bytes() for path in directory.glob("*.gguf")}
        return Original(files, has_oracle=False)

    return make


def _gguf_words() -> dict[str, Any]:
    said = vocabulary(json.loads(tokenizer().to_str()), pre="gpt-2")
    said["tokens"] += ENDS
    said["token_type"] += [3] * len(ENDS)
    for i in range(len(said["tokens"]), VOCAB_SIZE):
        said["tokens"].append(f"[PAD{i}]")
        said["token_type"].append(5)
    return said | {"bos_token_id": 258, "eos_token_id": 259, "chat_template": TEMPLATE}


def _gguf(kind: str, **config: Any) -> Callable[[Path], Original]:
    def make(directory: Path) -> Original:
        write_checkpoint(directory, **{**TINY, **config})
        file = write_gguf(
            directory,
            directory / GGUF_FILE,
            kind=GGMLQuantizationType[kind],
            tokenizer=_gguf_words(),
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
_NEWER: Mapping[str, Callable[[Path], Original]] = {
    **{
        name: _published(name)
        for name in ("nf4", "nf4-double", "int8-of-bitsandbytes", "mlx-4", "mlx-3", "mlx-mxfp4",
                     "nvfp4-of-modelopt", "fp8-of-modelopt", "fp8-of-fbgemm", "fp8-frozen",
                     "int8-frozen", "nvfp4-of-compressed-tensors", "mxfp4-of-compressed-tensors",
                     "auto-round", "auto-round-awq", "gptq-of-gptqmodel")
    },
    "bin": _pickled,
    "tekken": _with_texts(_tekken),
    "sentence-piece": _with_texts(_sentence_piece),
    "words-and-merges": _with_texts(_words_and_merges),
    "gguf-in-files": _gguf_of("llama", n_files=3),
    **{
        f"gguf-{name}": _gguf_of(name)
        for name in ("qwen3moe", "gpt-oss", "gemma3", "deepseek2", "granite", "cohere2", "qwen35")
    },
}  # fmt: skip

_MAKERS = {**_FAMILIES, **_FORMATS, **_NEWER}
FORMATS, FAMILIES, NEWER = tuple(_FORMATS), tuple(_FAMILIES), tuple(_NEWER)
"""Names of the checkpoints of one format each, of one family each, and of formats that programs
write since."""


def any_name(dice: Random) -> str:
    """Returns the name of a checkpoint: of a format in three cases of four."""
    return dice.choice(dice.choice((FORMATS, NEWER, NEWER, FAMILIES)))


@cache
def original(name: str) -> Original:
    """Returns a checkpoint by its name."""
    with TemporaryDirectory() as directory:
        return _MAKERS[name](Path(directory))
