"""What `transformers` makes of the files of a damaged checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from services.worker.models import quantization_config
from services.worker.models.model_types import ARCHITECTURES
from services.worker.models.registry import FAMILIES
from tests.fuzz.damaged.originals import GGUF_FILE
from tests.fuzz.damaged.outcome import PROMPT, TEXT

_FRACTIONS = frozenset(
    each.metadata.get("alias", each.name)
    for family in FAMILIES.values()
    for each in fields(family.config_type)
    if each.type in ("PositiveFloat", "NonNegativeFloat")
) - {"query_pre_attn_scalar"}
"""Keys of `config.json` whose values have a fraction in `transformers`."""


class NoOracle(Exception):
    """`transformers` does not read these files either."""


def logits(directory: Path, plain: Mapping[str, bytes] | None, twin: Path) -> Tensor:
    """Returns the logits after `PROMPT`, [1, vocab_size].

    For a quantised checkpoint these are the logits of `plain`, the weights that it means, with the
    damaged configuration; this checkpoint is written into `twin`.

    Raises:
        NoOracle: `transformers` refuses the files.
    """
    if (directory / GGUF_FILE).exists():
        return _logits(directory, gguf_file=GGUF_FILE)
    config = _config(directory)
    if plain is not None:
        for name, content in plain.items():
            (twin / name).write_bytes(content)
        for key in quantization_config.KEYS:
            config.pop(key, None)
        directory = twin
    (directory / "config.json").write_text(json.dumps(config))
    try:
        return _logits(directory)
    except NoOracle:
        used = _without_ignored(config)
        if used == config:
            raise
        (directory / "config.json").write_text(json.dumps(used))
        return _logits(directory)


def _without_ignored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config` without the keys that change no logit of the family, whose values
    `transformers` refuses if they are of another type."""
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    if architecture is None:
        return {**config}
    ignored = FAMILIES[architecture].config_type.ignored_keys
    return {key: value for key, value in config.items() if key not in ignored}


def _logits(directory: Path, **options: Any) -> Tensor:
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
            **options,
        )
        with torch.inference_mode():
            found: Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1:]
    except Exception as error:
        raise NoOracle(f"{type(error).__name__}: {error}") from error
    return found.float()


def _config(directory: Path) -> dict[str, Any]:
    """Returns `config.json`, in which a number with a fraction may be written as a whole one."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    for key in _FRACTIONS:
        if isinstance(config.get(key), int) and not isinstance(config[key], bool):
            config[key] = float(config[key])
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and type(rope.get("rope_theta")) is int:
        rope["rope_theta"] = float(rope["rope_theta"])  # which may be too large for 64 bits
    return config


def tokens(directory: Path) -> tuple[tuple[int, ...], str]:
    """Returns the tokens of `TEXT`, and their text.

    Raises:
        NoOracle: `transformers` refuses the files.
    """
    try:
        made = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        ids = made(TEXT)["input_ids"]
        text = made.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    except BaseException as error:
        raise NoOracle(f"{type(error).__name__}: {error}") from error
    return tuple(ids), str(text)
