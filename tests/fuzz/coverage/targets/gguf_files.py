"""Fuzzing target: the header of GGUF files, and the configuration and tokenizer that are made from
it."""

import struct
import tempfile
from contextlib import suppress
from pathlib import Path

from services.common.gguf.header import read_header
from services.common.gguf.model_config import frequency_factors, model_config
from services.common.gguf.tokenizer import special_tokens
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.tokenizer import Tokenizer
from tests.fuzz.coverage.target import Target

_DIRECTORY = tempfile.TemporaryDirectory()
_TEXT, _LIST, _UINT32, _INT32, _FLOAT32, _BOOL = 8, 9, 4, 5, 6, 7


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _texts(*texts: str) -> bytes:
    return struct.pack("<IQ", _TEXT, len(texts)) + b"".join(map(_text, texts))


def _numbers(kind: int, form: str, *numbers: float) -> bytes:
    return struct.pack(f"<IQ{len(numbers)}{form}", kind, len(numbers), *numbers)


def _file(vocabulary: dict[str, tuple[int, bytes]]) -> bytes:
    """Returns a file of a tiny Llama with a vocabulary, and factors of its frequencies."""
    sizes = {
        "block_count": 1, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8,
        "attention.head_count": 2,
    }  # fmt: skip
    values = {
        "general.architecture": (_TEXT, _text("llama")),
        **{f"llama.{key}": (_UINT32, struct.pack("<I", size)) for key, size in sizes.items()},
        "llama.attention.layer_norm_rms_epsilon": (_FLOAT32, struct.pack("<f", 1e-5)),
        **{f"tokenizer.{key}": value for key, value in vocabulary.items()},
    }
    keys = b"".join(
        _text(key) + struct.pack("<I", kind) + value for key, (kind, value) in values.items()
    )
    tensor = _text("rope_freqs.weight") + struct.pack("<IQIQ", 1, 2, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(values)) + keys + tensor
    return head + bytes(-len(head) % 32) + struct.pack("<2f", 1.0, 2.0)


_BYTE_LEVEL = {
    "ggml.model": (_TEXT, _text("gpt2")),
    "ggml.pre": (_TEXT, _text("llama-bpe")),
    "ggml.tokens": (_LIST, _texts("<s>", "a", "b", "ab")),
    "ggml.token_type": (_LIST, _numbers(_INT32, "i", 3, 1, 1, 1)),
    "ggml.merges": (_LIST, _texts("a b")),
    "ggml.bos_token_id": (_UINT32, struct.pack("<I", 0)),
    "chat_template": (_TEXT, _text("{{ bos_token }}")),
}
_PIECES = {
    "ggml.model": (_TEXT, _text("llama")),
    "ggml.tokens": (_LIST, _texts("<unk>", "<0x0A>", "a", "b", "ab")),
    "ggml.token_type": (_LIST, _numbers(_INT32, "i", 2, 6, 1, 1, 1)),
    "ggml.scores": (_LIST, _numbers(_FLOAT32, "f", 0, 0, -1, -2, -3)),
    "ggml.add_space_prefix": (_BOOL, b"\1"),
}


def run(data: bytes) -> None:
    """Reads bytes as a file, and makes of it all that services make."""
    path = Path(_DIRECTORY.name, "model.gguf")
    path.write_bytes(data)
    try:
        header = read_header(path)
    except ValueError as error:
        assert str(path) in str(error), error
        return
    special_tokens(header.metadata)
    with suppress(ValueError):
        model_config(header)
    with suppress(ValueError):
        frequency_factors(header)
    with suppress(ValueError):
        ChatTemplate.from_model(path)
    with suppress(ValueError):
        Tokenizer.from_model(path).to_tokens("ab a_b <s> é")


TARGET = Target(
    run=run,
    seeds=[
        *(whole[:n_bytes] for whole in map(_file, (_BYTE_LEVEL, _PIECES))
          for n_bytes in (len(whole), len(whole) - 8, 200, 24)),
    ],
    words=["general.architecture", "general.alignment", "tokenizer.ggml.", "linear", "gemma3",
           "llama.rope.scaling.type", "qwen2", "rope_freqs.weight", "split.count", "smollm"],
)  # fmt: skip
