"""Checks the keys of `config.json` and the kinds of their values.

No key is skipped silently. A key that the family's configuration does not know is refused by name,
unless the key is switched off (null, false or empty).
"""

from __future__ import annotations

import reprlib
from dataclasses import fields
from typing import Any

from services.worker.models.config import JsonObject, ModelConfig, UnsupportedModel

# Keys without effect on the computation of any model: training, other tasks, text, and defaults of
# generation, which the client chooses. `auto_map` names programs of the checkpoint, which are not
# run, as in `transformers` and vLLM.
_HARMLESS_KEYS = frozenset((
    "attention_dropout", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
    "initializer_range", "is_matryoshka", "label2id", "length_penalty", "matryoshka_dimensions",
    "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "pad_token_id", "prefix", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sentence_transformers", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tokenizer_class", "top_k", "top_p", "torchscript", "transformers.js_config",
    "transformers_version", "typical_p", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_cache",
))  # fmt: skip

# Keys that every model of `transformers` reads, and that are switched on if they are missing.
_ON_BY_DEFAULT = frozenset(("is_causal",))

# Booleans that families read themselves.
_BOOLEAN_KEYS = frozenset(("use_sliding_window",))

# Tokens in `config.json`, also if nothing reads them. `transformers` refuses a value that is no
# token, too.
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")

_SHORT = reprlib.Repr()
_SHORT.maxdict, _SHORT.maxstring = 16, 80


def shortened(value: object) -> str:
    """Returns a text of `value` for a message. Values in a file may have megabytes."""
    return _SHORT.repr(value)


def refuse_unknown_keys(config: JsonObject, known: set[str]) -> None:
    """Raises UnsupportedModel if a key of `config` has an effect and is not in `known`."""
    unknown = {
        key: value
        for key, value in config.items()
        # A key with a leading underscore is internal to the program that wrote the file.
        if key not in known | _HARMLESS_KEYS and not key.startswith("_") and not _is_off(key, value)
    }
    if unknown:
        raise UnsupportedModel(
            f"config.json has options that are not supported: {shortened(unknown)}"
        )


def _is_off(key: str, value: Any) -> bool:
    """Returns whether `value` switches `key` off, so that the key changes nothing: null, false or
    empty, or true for the keys `_ON_BY_DEFAULT`."""
    return value is True if key in _ON_BY_DEFAULT else not value


def ignored_keys(
    given: JsonObject, config: JsonObject, config_type: type[ModelConfig]
) -> tuple[str, ...]:
    """Returns the keys of `given`, the whole file, that were not used. `config` has the keys of the
    text model."""
    unread = _HARMLESS_KEYS | config_type.ignored_keys | (given.keys() - config.keys())
    keys = {**given, **config}
    return tuple(sorted(key for key in unread & keys.keys() if keys[key] and key != "text_config"))


def check_booleans(config_type: type[ModelConfig], values: JsonObject) -> None:
    """Raises UnsupportedModel if a boolean field has a value that is not a boolean.

    Without this check, pydantic would accept numbers, and texts such as "no".
    """
    booleans = {each.name for each in fields(config_type) if each.type == "bool"}
    keys = config_type.keys()
    for key in sorted({keys[name] for name in booleans} | booleans | _BOOLEAN_KEYS):
        value = values.get(key)
        if value is not None and not isinstance(value, bool):
            raise UnsupportedModel(f"config.json: {key} {shortened(value)} is no boolean")


def check_token_ids(config: JsonObject) -> None:
    """Raises UnsupportedModel if a key for a token id has a value that is neither null nor an
    integer. The value of `eos_token_id` may also be a list of integers."""
    for key in _TOKEN_KEYS:
        value = config.get(key)
        tokens = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if value is not None and any(type(token) is not int for token in tokens):
            raise UnsupportedModel(f"config.json: {key} {shortened(value)} is no token")
