"""Reads how vectors (embeddings or scores) are made of a checkpoint's hidden states: from the files
of `sentence-transformers`, from `config.json` if it names a classification head, or from the
operator's setting.

`modules.json` lists the modules that follow the model. Pooling and normalisation are served, all
others are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common import bounded_file
from services.common.pooling import Pooling, PoolingKind, PoolingSetting
from services.common.tokenizer_files.find import read_tokenizer, tokenizer_file
from services.worker.models.config import JsonObject, UnsupportedModel

MODULES = "modules.json"

CLASSIFIER = "ForSequenceClassification"
"""End of the architecture of a checkpoint with a classification head."""

ANSWERS = ("yes", "no")
"""The tokens whose logits make a score with the pooling `yes-no`."""

_MAX_FILE_BYTES = 1 << 20

_MODES: Mapping[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_KINDS: Mapping[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_SIGMOID, _IDENTITY = "Sigmoid", "Identity"
_OLD_ACTIVATION = "sbert_ce_default_activation_function"  # key of files before `activation_fn`


def read_pooling(
    model: Path, config: JsonObject, setting: PoolingSetting, *, hidden_size: int
) -> Pooling | None:
    """Returns how the hidden states of a checkpoint become vectors. Returns None if neither the
    checkpoint's files nor the setting say it. `config` is the content of `config.json`.

    Raises UnsupportedModel for a file that cannot be read, for pooling that is not served, and for
    a setting that contradicts the files.
    """
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith(CLASSIFIER):
        if setting:
            raise UnsupportedModel(f"pooling: {setting} of a checkpoint with a classification head")
        return _classification(config)
    path = model / MODULES
    modules = _modules_in(path)
    if modules is not None and (setting != "yes-no" or "Pooling" in dict(modules)):
        return _of_modules(path, modules, setting, hidden_size)
    if not setting:
        return None
    if setting == "yes-no":
        return Pooling(
            kind="last",
            n_values=1,
            head="yes-no",
            has_sigmoid=True,
            answer_token_ids=_answer_tokens(model),
            generates=True,
        )
    return Pooling(kind=setting, n_values=hidden_size, is_normalised=True, generates=True)


def of_encoder(
    pooling: Pooling, *, token_type_stride: int, padding_token_id: int | None
) -> Pooling:
    """Returns `pooling` with the fields that are the same for every encoder: an encoder generates
    no tokens and gets each prompt whole, and its classification head takes the state of the first
    token.

    Raises UnsupportedModel for pooling that only decoders have.
    """
    if pooling.head == "yes-no":
        raise UnsupportedModel("pooling: yes-no needs a model that generates tokens")
    return replace(
        pooling,
        kind="cls" if pooling.head == "classification" else pooling.kind,
        generates=False,
        runs_whole=True,
        token_type_stride=token_type_stride,
        padding_token_id=padding_token_id,
    )


_Modules = Sequence[tuple[str, str]]
"""Type of the modules of a checkpoint: the kind and the folder of each."""


def _modules_in(path: Path) -> _Modules | None:
    """Returns the modules in `modules.json`, in order. Returns None if there is no such file."""
    if not path.is_file():
        return None
    modules = _read_json(path)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise UnsupportedModel(f"{path} is not a list of modules")
    return [
        (str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", "")))
        for module in modules
    ]


def _of_modules(
    path: Path, modules: _Modules, setting: PoolingSetting, hidden_size: int
) -> Pooling:
    """Returns how the modules in `modules.json` make vectors. Raises UnsupportedModel if they are
    not served, or if the setting contradicts them."""
    if not setting:
        return _served(path, modules, hidden_size)
    try:
        pooling = _served(path, modules, hidden_size)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"pooling: {setting} contradicts the checkpoint: {error}") from error
    if setting != pooling.kind:
        raise UnsupportedModel(f"pooling: {setting} contradicts {path}: pooling {pooling.kind}")
    return replace(pooling, generates=True)


def _served(path: Path, modules: _Modules, hidden_size: int) -> Pooling:
    kinds = [kind for kind, _ in modules]
    after = kinds[1:]
    if kinds[:1] != ["Transformer"] or after not in (["Pooling"], ["Pooling", "Normalize"]):
        raise UnsupportedModel(
            f"{path}: the modules {', '.join(kinds)} are not served, only Transformer, Pooling "
            "and Normalize"
        )
    kind = _kind_of(path.parent / modules[1][1] / "config.json", hidden_size)
    return Pooling(kind=kind, n_values=hidden_size, is_normalised="Normalize" in after)


def _kind_of(path: Path, hidden_size: int) -> PoolingKind:
    config = _read_json(path)
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path} is not an object")
    size = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if size != hidden_size:
        raise UnsupportedModel(f"{path}: vectors of {size} elements, not of {hidden_size}")
    modes = _modes_of(path, config)
    if len(modes) != 1 or (modes[0] not in _MODES and modes[0] not in _KINDS):
        raise UnsupportedModel(f"{path}: pooling {', '.join(modes) or 'of no kind'} is not served")
    kind = {**_MODES, **_KINDS}[modes[0]]
    if kind == "mean" and config.get("include_prompt", True) is not True:
        raise UnsupportedModel(f"{path}: include_prompt false is not served")
    return kind


def _modes_of(path: Path, config: Mapping[str, Any]) -> Sequence[str]:
    """Returns the names of the ways of pooling that a configuration switches on."""
    named = config.get("pooling_mode")
    if named is not None:
        return [str(one) for one in named] if isinstance(named, list) else [str(named)]
    return [key for key in config if key.startswith("pooling_mode_") and config[key] is True]


def _classification(config: JsonObject) -> Pooling:
    labels = config.get("id2label") or {}
    if not isinstance(labels, Mapping):
        raise UnsupportedModel("config.json: id2label is not an object")
    n_labels = len(labels) or config.get("num_labels", 2)
    if n_labels != 1:
        raise UnsupportedModel(f"config.json: {n_labels} labels are not served, only one is")
    settings = config.get("sentence_transformers") or {}
    given = settings.get("activation_fn") if isinstance(settings, dict) else None
    given = config.get(_OLD_ACTIVATION) if given is None else given
    activation = _SIGMOID if given is None else str(given).rsplit(".", 1)[-1]
    if activation not in (_SIGMOID, _IDENTITY):
        raise UnsupportedModel(f"config.json: activation_fn {activation} is not served")
    return Pooling(
        kind="last", n_values=1, head="classification", has_sigmoid=activation == _SIGMOID
    )


def _answer_tokens(model: Path) -> tuple[int, ...]:
    """Returns the ids of the tokens `yes` and `no` in a model's vocabulary. Raises UnsupportedModel
    if they cannot be read."""
    file = tokenizer_file(model)
    try:
        vocabulary = json.loads(read_tokenizer(file))["model"]["vocab"]
        return tuple(int(vocabulary[answer]) for answer in ANSWERS)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UnsupportedModel(
            f"pooling: yes-no needs the tokens {' and '.join(ANSWERS)}: {file}: {error}"
        ) from error


def _read_json(path: Path) -> Any:
    try:
        return bounded_file.read_json(path, max_bytes=_MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
