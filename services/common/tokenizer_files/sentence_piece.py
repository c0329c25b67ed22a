"""Translates `tokenizer.model`, the file of a SentencePiece model, which Llama and Gemma use.

Two kinds of models are translated: byte pair encoding, whose merges are made here from the order of
the scores, and unigram models. A space is added in front of a text by the rules of the
`transformers` library. These rules differ from SentencePiece in two cases. No space is added to a
text that begins with a space. And no space is added to the text after a special token, unless
`legacy` is true.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from services.common import bounded_file
from services.common.tokenizer_files.named_tokens import NamedTokens
from services.common.tokenizer_files.sentence_piece_model import ModelProto
from services.common.tokenizer_parts import (
    MAX_TOKENS,
    Json,
    added_token,
    around,
    bpe,
    document,
    merges_of,
)

FILE = "tokenizer.model"

MAX_BYTES = 64 << 20
"""Largest size of a `tokenizer.model` in bytes, ten times the size of published files."""

_UNIGRAM, _BPE = 1, 2  # kinds of models
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space


def read_sentence_piece(path: Path) -> str:
    """Reads a `tokenizer.model`, and returns it as a `tokenizer.json`.

    Raises:
        OSError: a file cannot be read.
        ValueError, LookupError, TypeError: a file is broken, or the model of an unknown kind.
    """
    model = _model(path)
    named = NamedTokens.beside(path, default_roles(path))
    vocab = {piece.piece: place for place, piece in enumerate(model.pieces)}
    if len(vocab) < len(model.pieces):
        raise ValueError("has a piece twice")
    has_prefix = named.flag("add_prefix_space", default=model.normalizer_spec.add_dummy_prefix)
    strips = model.normalizer_spec.remove_extra_whitespaces
    escapes = strips or not has_prefix
    added = {token["content"]: token for token in _added(model, in_normal_form=escapes)}
    added |= {token["content"]: token for token in named.tokens(vocab)}
    starts = named.flag("add_bos_token", default=True)
    ends = named.flag("add_eos_token", default=False)
    return document(
        added.values(),
        normalizer=_normalizer(model, escapes=escapes, prepends=has_prefix),
        pre_tokenizer=_prefix(named.config) if not escapes else None,
        post_processor=around(
            named.with_role("bos_token", vocab) if starts else None,
            named.with_role("eos_token", vocab) if ends else None,
        ),
        decoder=_decoder(strips=has_prefix),
        model=_unigram(model, named.added)
        if model.trainer_spec.model_type == _UNIGRAM
        else _bpe(model, {**vocab, **named.added}),
    )


def default_roles(path: Path) -> Mapping[str, str]:
    """Returns the default texts of tokens by their roles, such as `bos_token`, as the model's
    trainer has stored them.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is broken.
    """
    model = _model(path)
    spec = model.trainer_spec
    ids = {
        "unk_token": spec.unk_id,
        "bos_token": spec.bos_id,
        "eos_token": spec.eos_id,
        "pad_token": spec.pad_id,
    }
    return {
        role: model.pieces[token_id].piece
        for role, token_id in ids.items()
        if 0 <= token_id < len(model.pieces)
    }


def _model(path: Path) -> Any:
    content = bounded_file.read_bytes(path, max_bytes=MAX_BYTES)
    try:
        model = ModelProto.FromString(content)
    except DecodeError as error:
        raise ValueError(f"{path} is no SentencePiece model: {error}") from error
    if not 0 < len(model.pieces) <= MAX_TOKENS:
        raise ValueError(f"{path} is no SentencePiece model: it has {len(model.pieces)} pieces")
    kind = model.trainer_spec.model_type
    if kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"{path} is a model of kind {kind}; only BPE and unigram models are read")
    return model


def _added(model: Any, *, in_normal_form: bool) -> Iterator[Json]:
    """Yields the pieces that the tokenizer looks for in a text before it divides the rest.
    `in_normal_form` says that the tokenizer looks for these pieces only after it has replaced the
    spaces in the text.
    """
    for token_id, piece in enumerate(model.pieces):
        if piece.type in (_UNKNOWN, _CONTROL):
            yield added_token(piece.piece, token_id, special=True)
        elif piece.type == _USER_DEFINED and (in_normal_form or _SPACE not in piece.piece):
            yield added_token(piece.piece, token_id, special=False, normalized=in_normal_form)


def _normalizer(model: Any, *, escapes: bool, prepends: bool) -> Json | None:
    spec = model.normalizer_spec
    steps: list[Json] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if escapes and prepends:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    if escapes:
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _prefix(config: Mapping[str, Any]) -> Json:
    return {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always" if config.get("legacy") else "first",
        "split": False,
    }


def _decoder(*, strips: bool) -> Json:
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strips:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _unknown(model: Any) -> int | None:
    """Returns the id of the piece for unknown text, or None if the model has no such piece."""
    found = (place for place, piece in enumerate(model.pieces) if piece.type == _UNKNOWN)
    return next(found, None)


def _unigram(model: Any, added: Mapping[str, int]) -> Json:
    vocab = [(piece.piece, piece.score) for piece in model.pieces]
    beyond = sorted((token_id, text) for text, token_id in added.items() if token_id >= len(vocab))
    if [token_id for token_id, _ in beyond] != [*range(len(vocab), len(vocab) + len(beyond))]:
        raise ValueError("has added tokens whose numbers leave a gap")
    unknown = _unknown(model)
    if unknown is None:
        raise ValueError("is a unigram model without a piece for unknown characters")
    return {
        "type": "Unigram",
        "unk_id": unknown,
        "vocab": vocab,
        "byte_fallback": model.trainer_spec.byte_fallback,
    }


def _bpe(model: Any, vocab: Mapping[str, int]) -> Json:
    ranked = {
        piece.piece: -piece.score
        for piece in model.pieces
        if piece.type == _NORMAL or (piece.type == _USER_DEFINED and _SPACE in piece.piece)
    }
    unknown = _unknown(model)
    return bpe(
        vocab,
        merges_of(ranked),
        unk_token=None if unknown is None else model.pieces[unknown].piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )
