"""llama.cpp's library, driven by a small loop over sequence slots, like the loop of `llama-server`.

A step decodes one token of every slot whose prompt is complete, and fills the rest of the batch
with prompts, in the order of the slots. A GGUF file is loaded directly. A checkpoint is converted
once, into the folder `--converted`, with llama.cpp's names for the tensors of a Llama; other
architectures are refused.
"""

import argparse
import ctypes
import json
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.peers.protocol import Pipe, TokenIds, adapter_options, serve

FILE_TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "fp32": gguf.GGMLQuantizationType.F32}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@dataclass(slots=True)
class Slot:
    """A sequence number of the K/V cache, and the request that uses it."""

    number: int
    index: int
    prompt: TokenIds
    n_left: int
    n_stored: int = 0
    last_token: int = 0


@dataclass(slots=True)
class Columns:
    """The input of one call of llama.cpp, with one row per token."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    samples: dict[int, Slot] = field(default_factory=dict)
    """Slots that sample a token, by the row of the input whose logits they use."""

    def add(self, slot: Slot, tokens: TokenIds, *, samples: bool) -> None:
        """Adds the next tokens of a slot to the input. With `samples`, a token is sampled after the
        last one."""
        self.positions.extend(range(slot.n_stored, slot.n_stored + len(tokens)))
        self.tokens.extend(tokens)
        self.sequences.extend([slot.number] * len(tokens))
        slot.n_stored += len(tokens)
        if samples:
            self.samples[len(self.tokens) - 1] = slot


class LlamaCppEngine:
    """llama.cpp's context, its slots, and the requests that wait for a slot."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}
        self.settings: dict[str, Any] = {
            "file": options.model.name if options.model.is_file() else options.dtype,
            "n_seq_max": options.max_batch_size,
            "n_batch": options.max_batch_tokens,
            "n_threads": options.threads,
            "n_ctx_seq": options.max_model_len,
        }
        path = options.model
        if not path.is_file():
            path = converted(options.model, options.converted, options.dtype)
        self._model = loaded(path)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = options.max_model_len * options.max_batch_size
        parameters.n_batch = parameters.n_ubatch = options.max_batch_tokens
        parameters.n_seq_max = options.max_batch_size
        parameters.n_threads = parameters.n_threads_batch = options.threads
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context of this size")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(options.max_batch_tokens, 0, 1)
        self._free = list(range(options.max_batch_size))
        self._slots: list[Slot] = []
        self._waiting: deque[tuple[int, TokenIds, int]] = deque()

    def submit(self, index: int, prompt_token_ids: TokenIds, n_output: int) -> None:
        self._waiting.append((index, prompt_token_ids, n_output))

    def step(self) -> dict[int, TokenIds]:
        while self._waiting and self._free:
            self._slots.append(Slot(self._free.pop(), *self._waiting.popleft()))
        columns = self._select()
        self._compute(columns)
        news: dict[int, TokenIds] = {}
        for row, slot in columns.samples.items():
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            slot.last_token = int(np.ctypeslib.as_array(logits, (self._n_vocab,)).argmax())
            slot.n_left -= 1
            news[slot.index] = [slot.last_token]
            if slot.n_left == 0:
                self._release(slot)
        return news

    def _select(self) -> Columns:
        """Returns the next batch, which is filled with decodes first and then with prompts."""
        columns = Columns()
        for slot in self._slots:
            if slot.n_stored >= len(slot.prompt):
                columns.add(slot, [slot.last_token], samples=True)
        for slot in self._slots:
            n_free = self.settings["n_batch"] - len(columns.tokens)
            if slot.n_stored < len(slot.prompt) and n_free:
                chunk = slot.prompt[slot.n_stored : slot.n_stored + n_free]
                is_last = slot.n_stored + len(chunk) == len(slot.prompt)
                columns.add(slot, chunk, samples=is_last)
        return columns

    def _compute(self, columns: Columns) -> None:
        batch = self._batch
        batch.n_tokens = len(columns.tokens)
        for row, token in enumerate(columns.tokens):
            batch.token[row] = token
            batch.pos[row] = columns.positions[row]
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = columns.sequences[row]
            batch.logits[row] = row in columns.samples
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")

    def _release(self, slot: Slot) -> None:
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_rm(memory, slot.number, -1, -1)
        self._slots.remove(slot)
        self._free.append(slot.number)


def loaded(path: Path) -> Any:
    """Loads a GGUF file and returns llama.cpp's model. Raises RuntimeError if llama.cpp cannot load
    the file."""
    llama_cpp.llama_log_set(SAY_NOTHING, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp does not load {path}")
    return model


def say_nothing(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """A log callback that ignores llama.cpp's messages, of which there is one for each node of its
    graph."""


SAY_NOTHING = llama_cpp.llama_log_callback(say_nothing)


def converted(model: Path, folder: Path, dtype: str) -> Path:
    """Returns the path of the model in llama.cpp's format. If the file is missing in `folder`,
    first converts the model."""
    path = folder / f"{dtype}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        convert(model, unfinished, dtype)
        unfinished.rename(path)
    return path


def convert(model: Path, path: Path, dtype: str) -> None:
    """Writes a Llama checkpoint of `transformers` as a GGUF file.

    Raises:
        ValueError: the checkpoint is not a Llama.
    """
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{config['model_type']} is no Llama")
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    add_vocabulary(writer, config["vocab_size"])
    for name, tensor in read_tensors(model):
        add_tensor(writer, *renamed(name, tensor, config), FILE_TYPES[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    n_heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_vocab_size(config["vocab_size"])


def head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_theta(config: dict[str, Any]) -> float:
    """Returns the base of the rotary embedding from a checkpoint's configuration, as old or new
    versions of transformers write it."""
    parameters = config.get("rope_parameters") or config
    return float(parameters["rope_theta"])


def add_vocabulary(writer: gguf.GGUFWriter, n_tokens: int) -> None:
    """Adds a name for each token id, which the format requires. Any names will do, because prompts
    and outputs are ids."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{token_id}>" for token_id in range(n_tokens)])
    writer.add_token_scores([0.0] * n_tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * n_tokens)


def read_tensors(model: Path) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    """Yields the name and the values of every weight of a checkpoint, as float32."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            (n_header,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(n_header))
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + n_header)
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                yield name, as_float32(data[begin:end], about["dtype"]).reshape(about["shape"])


def as_float32(
    data: np.ndarray[Any, np.dtype[np.uint8]], dtype: str
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the bytes `data` of element type `dtype` as an array of float32. A bfloat16 has the
    upper two bytes of a float32."""
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view({"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def renamed(
    name: str, tensor: np.ndarray[Any, np.dtype[np.float32]], config: dict[str, Any]
) -> tuple[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Returns llama.cpp's name of a tensor, and the tensor with llama.cpp's order of rotary
    elements. There the two elements of a rotary pair are neighbours, and not half a head apart."""
    stem = name.removesuffix(".weight")
    if stem in TENSORS:
        return f"{TENSORS[stem]}.weight", tensor
    _, _, layer, part = stem.split(".", 3)
    if part.endswith(("q_proj", "k_proj")):
        pairs = tensor.reshape(-1, 2, head_dim(config) // 2, tensor.shape[-1])
        tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
    return f"blk.{layer}.{LAYER_TENSORS[part]}.weight", tensor


def add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    tensor: np.ndarray[Any, np.dtype[np.float32]],
    file_type: gguf.GGMLQuantizationType,
) -> None:
    """Adds a tensor to the file: a matrix in `file_type`, a vector in float32, as llama.cpp
    requires."""
    if tensor.ndim == 1:
        file_type = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(tensor, file_type), raw_dtype=file_type)


def main() -> None:
    parser = adapter_options(__doc__, dtypes=FILE_TYPES, max_batch_size=16)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=1024)
    pipe = Pipe()
    serve(pipe, LlamaCppEngine(parser.parse_args()))


if __name__ == "__main__":
    main()
