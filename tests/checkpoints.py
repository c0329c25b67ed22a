"""Tiny random checkpoints of every family, and `transformers` as an independent oracle for them.

`transformers` itself writes the checkpoints, so that their names and shapes are those of published
checkpoints. The weights are so large that logits of different tokens differ clearly.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

logging.disable_progress_bar()

# Threads that wait for each other cost more than all the arithmetic of these models.
torch.set_num_threads(1)

# The files of each checkpoint that there has been, by what they were made of.
_written: dict[tuple[type[PreTrainedConfig], str, int, torch.dtype, str], dict[str, bytes]] = {}

SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "eos_token_id": 2,
}


def write_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Writes a random Llama into `directory` and returns `directory`.

    `config` overrides fields of `SMALL`, with the names of `LlamaConfig`. If `max_shard_size` is
    below the model's size, there are several weight files and an index. The checkpoint has weights
    and configurations, but no tokenizer.
    """
    whole = LlamaConfig(**{**SMALL, **config})
    return _write(directory, LlamaForCausalLM, whole, seed, dtype, max_shard_size)


def write_family_checkpoint(
    directory: Path,
    config: PreTrainedConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kind: Any = None,
) -> Path:
    """Writes a random model of any family, given by its own configuration, and returns `directory`.
    The model is of the automatic class `kind`, by default the class that generates text."""
    kind = kind or _auto_class(config)
    return _write(directory, kind.from_config, config, seed, dtype, "1GB")


def _write(
    directory: Path,
    make: Callable[[Any], Any],
    config: PreTrainedConfig,
    seed: int,
    dtype: torch.dtype,
    max_shard_size: str,
) -> Path:
    """Writes a checkpoint to a directory. The files of every checkpoint that this process has
    written are kept in memory and written again, since making random weights takes long."""
    kind = getattr(make, "__qualname__", "")
    whole = f"{getattr(make, '__self__', kind)} {config.to_json_string(use_diff=False)}"
    what = (type(config), whole, seed, dtype, max_shard_size)
    if what not in _written:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = make(config)
            _draw_vectors(model)
        torch.nn.Module.to(model, dtype=dtype)
        with TemporaryDirectory() as new:
            model.save_pretrained(new, max_shard_size=max_shard_size)
            _written[what] = {path.name: path.read_bytes() for path in Path(new).iterdir()}
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in _written[what].items():
        (directory / name).write_bytes(content)
    return directory


def _auto_class(config: PreTrainedConfig) -> Any:
    """Returns the automatic class that makes a model of this configuration which generates text. It
    is another class for models that also take images."""
    is_known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    takes_text_alone = is_known and getattr(config, "vision_config", None) is None
    return AutoModelForCausalLM if takes_text_alone else AutoModelForImageTextToText


def _draw_vectors(model: torch.nn.Module) -> None:
    """Gives random values to the biases, norms and scales of a model. They would otherwise be zeros
    and ones, with which a test could not see whether they are used."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("_bias"):
            is_norm = name.endswith("weight") and bool(parameter.eq(1).all())
            torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.3)
        if name.endswith("_bias"):
            torch.nn.init.normal_(buffer, std=0.3)


def edit_config(directory: Path, *, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    """Changes keys of a checkpoint's `config.json`, and returns `directory`."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key in remove:
        del config[key]
    path.write_text(json.dumps({**config, **changes}))
    return directory


class Oracle:
    """The model of a checkpoint, run by `transformers`."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        self._model = _auto_class(config).from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
        )

    @property
    def model(self) -> torch.nn.Module:
        """The model itself, for a test that changes its weights."""
        model: torch.nn.Module = self._model
        return model

    def modules(self) -> list[torch.nn.Module]:
        """Returns all modules of the model, for a test that replaces some."""
        return [*self._model.modules()]

    def logits(self, token_ids: list[int]) -> Tensor:
        """Returns the float32 logits after each of the tokens, [n_tokens, vocab_size]."""
        with torch.inference_mode():
            logits: Tensor = self._model(torch.tensor([token_ids]), use_cache=False).logits
        return logits[0].float()

    def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        repetition_penalty: float = 1.0,
        guess: Sequence[int] = (),
    ) -> list[int]:
        """Returns the tokens that greedy `generate` of `transformers` appends to a prompt.

        `guess` may have the expected tokens. If they are right, one pass through the model confirms
        them, instead of one pass for each token. If they are wrong, `generate` runs.
        """
        if guess and self._confirms(prompt, guess, max_tokens, repetition_penalty):
            return list(guess)
        prompts = torch.tensor([prompt])
        output = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max_tokens,
            do_sample=False,
            repetition_penalty=repetition_penalty,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def _confirms(
        self, prompt: list[int], guess: Sequence[int], max_tokens: int, repetition_penalty: float
    ) -> bool:
        """Returns whether `generate` would return `guess`: each token is the argmax after the
        tokens before it, and `generate` stops after the last one."""
        ends = {*torch.tensor(self._model.generation_config.eos_token_id).view(-1).tolist()}
        is_whole = len(guess) == max_tokens or (len(guess) < max_tokens and guess[-1] in ends)
        if not is_whole or ends.intersection(guess[:-1]):
            return False
        tokens = torch.tensor([*prompt, *guess])
        penalize = RepetitionPenaltyLogitsProcessor(repetition_penalty)
        logits = self.logits(tokens[:-1].tolist())
        return all(
            bool(penalize(tokens[None, :at], logits[None, at - 1]).argmax() == tokens[at])
            for at in range(len(prompt), len(tokens))
        )
