"""Translates the rotary settings of a GGUF file to the rotary settings of `config.json`."""

from __future__ import annotations

from services.common.gguf.architecture import Config, Metadata

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""Names of the tensors with the factors of longrope. Each has one factor for each frequency."""

KEYS = frozenset((
    "rope.dimension_count", "rope.scaling.attn_factor", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
))  # fmt: skip
"""Keys of a GGUF file's metadata that this module reads, without the prefix of the architecture."""

_LOG_SCALE = 0.1  # "yarn" scales by 1 + 0.1 * ln(factor); some files include the 0.1


def rope_scaling(said: Metadata) -> Config:
    """Returns the settings by which positions beyond the trained context length are scaled.

    The result has the keys of `rope_scaling`. It is empty if positions are not scaled.

    Raises:
        OSError: factors cannot be read.
        ValueError: the type is unknown, or a setting is missing.
    """
    kind = said.value("rope.scaling.type")
    if said.has(LONG) or said.has(SHORT):
        return _longrope(said)
    if kind in (None, "none"):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": _factor(said)}
    if kind == "yarn":
        return _yarn(said)
    raise ValueError(
        f"{said.name('rope.scaling.type')} {repr(kind)[:80]} is not one of "
        "['none', 'linear', 'yarn', 'longrope']; longrope needs the tensors of its factors"
    )


def _factor(said: Metadata) -> float:
    factor = said.number("rope.scaling.factor")
    if factor is None:
        raise ValueError(f"{said.name('rope.scaling.factor')} is missing")
    return float(factor)


def _yarn(said: Metadata) -> Config:
    if said.number("rope.scaling.yarn_ext_factor") not in (None, 1.0):
        raise ValueError(f"{said.name('rope.scaling.yarn_ext_factor')} is not 1")
    optional = {
        "attention_factor": said.number("rope.scaling.yarn_attn_factor"),
        "beta_fast": said.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": said.number("rope.scaling.yarn_beta_slow"),
        "original_max_position_embeddings": said.integer("rope.scaling.original_context_length"),
    }
    return {
        "rope_type": "yarn",
        "factor": _factor(said),
        **{key: value for key, value in optional.items() if value is not None},
    }


def log_scale(said: Metadata, *, has_tenth: bool) -> Config:
    """Returns the keys `mscale` and `mscale_all_dim` of `rope_scaling`. Both have the number m of
    the scale `1 + 0.1 * m * ln(factor)`, which "yarn" has in some model families. If `has_tenth`,
    the file has `0.1 * m` instead of m. Returns an empty configuration if the file has no such
    number."""
    factor = said.number("rope.scaling.yarn_log_multiplier")
    if not factor:
        return {}
    scale = round(factor / _LOG_SCALE, 6) if has_tenth else float(factor)
    return {"mscale": scale, "mscale_all_dim": scale}


def _longrope(said: Metadata) -> Config:
    """Returns the rotary settings for "longrope". The factors are read from tensors."""
    for name in (LONG, SHORT):
        if not said.has(name):
            raise ValueError(f"{said.header.path} lacks {name}")
    original = said.needed("rope.scaling.original_context_length")
    factor = said.number("rope.scaling.attn_factor")
    return {
        "rope_type": "longrope",
        "long_factor": list(said.header.floats(LONG)),
        "short_factor": list(said.header.floats(SHORT)),
        "original_max_position_embeddings": original,
        **({} if factor is None else {"attention_factor": float(factor)}),
    }
