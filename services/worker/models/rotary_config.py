"""The configuration of rotary embedding, and the fields of the descendants of Llama.

Files have one of two spellings of the rotary settings: `rope_theta` with `rope_scaling`, or the
newer `rope_parameters`. Both are read. `rope.py` computes the angles from these settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from services.worker.models.config import (
    Flag,
    JsonObject,
    ModelConfig,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    UnsupportedModel,
    default_head_dim,
    require,
)

# The keys that each type needs, and its optional keys.
_ROPE_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "proportional": ((), ("factor",)),
    "llama3": (
        (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings", "factor"),
        ("attention_factor",),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The settings that determine the rotary angle of each position. Only the fields that
    `rope_type` uses have a value."""

    rope_type: Literal[
        "default", "linear", "dynamic", "proportional", "llama3", "yarn", "longrope"
    ] = "default"
    rope_theta: PositiveFloat  # base of the wavelengths
    partial_rotary_factor: PositiveFloat = 1.0  # rotated share of a head, at its beginning
    factor: PositiveFloat | None = None  # factor by which the context was stretched
    original_max_position_embeddings: PositiveInt | None = None  # original context, tokens
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None  # factor of rotated elements
    beta_fast: PositiveFloat | None = None  # full turns in the original context
    beta_slow: PositiveFloat | None = None
    mscale: NonNegativeFloat | None = None
    mscale_all_dim: NonNegativeFloat | None = None
    truncate: Flag | None = None
    short_factor: tuple[PositiveFloat, ...] | None = (
        None  # for each frequency, in the original context
    )
    long_factor: tuple[PositiveFloat, ...] | None = None  # for each frequency, in longer contexts
    # Divisors of the frequencies, in addition to the effect of the type; GGUF files have them.
    frequency_factors: tuple[PositiveFloat, ...] | None = None

    def check(self) -> None:
        """Raises ValueError if a setting that the type needs is missing or invalid."""
        for key in _ROPE_KEYS[self.rope_type][0]:
            if getattr(self, key) is None:
                raise ValueError(f"{key} is missing for rope_type {self.rope_type!r}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low_freq_factor ({low}) is not below high_freq_factor ({high})")
        if self.rope_type == "yarn" and self.rope_theta <= 1:
            raise ValueError(f"rope_theta ({self.rope_theta}) is not above 1, as yarn needs it")
        for key, n_turns in (("beta_fast", self.beta_fast), ("beta_slow", self.beta_slow)):
            original = self.original_max_position_embeddings
            if n_turns is not None and original is not None and math.isinf(original / n_turns):
                raise ValueError(f"{key} ({n_turns}) is no number of turns")
        if self.rope_type == "longrope" and self.original_max_position_embeddings == 1:
            raise ValueError("original_max_position_embeddings (1) is no context to stretch")


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(ModelConfig):
    """The configuration fields of Llama's descendants, which have grouped-query attention, rotary
    positions and gated MLPs."""

    read_keys = frozenset((
        "num_key_value_heads", "head_dim", "hidden_act", "rope_theta", "rope_scaling",
        "rope_parameters", "partial_rotary_factor",
    ))  # fmt: skip

    default_rope_theta: ClassVar[float] = 10_000.0
    # K/V heads if the file lacks the key; None, like null in a file: as many as query heads.
    default_n_kv_heads: ClassVar[int | None] = None
    hidden_acts: ClassVar[tuple[str, ...]] = ("silu",)
    # Rotated share of a head if the file lacks it; None: always whole heads.
    default_partial_rotary_factor: ClassVar[float | None] = None
    turns_neighbours: ClassVar[bool] = False  # rotated pairs are neighbours, not half a head apart

    intermediate_size: PositiveInt
    rms_norm_eps: PositiveFloat
    rope: RopeConfig

    @property
    def rotary_dim(self) -> int:
        """The number of rotated elements of a head. The rotated elements are the first ones of the
        head.

        With the type "proportional" this is the whole head: elements that are not rotated have the
        frequency 0.
        """
        if self.rope.rope_type == "proportional":
            return self.head_dim
        return int(self.head_dim * self.rope.partial_rotary_factor)

    def check(self) -> None:
        super().check()
        self.check_rope(self.rope)
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) is odd; rotary embedding turns pairs")
        share = self.rope.partial_rotary_factor
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim or share > 1:
            raise ValueError(
                f"partial_rotary_factor ({share}) turns {self.rotary_dim} of {self.head_dim} "
                "elements, which are no pairs of them"
            )

    def check_rope(self, rope: RopeConfig) -> None:
        """Raises ValueError if rotary settings are incomplete, invalid, or do not fit the size of
        the heads."""
        rope.check()
        for key, factors in (
            ("short_factor", rope.short_factor),
            ("long_factor", rope.long_factor),
            ("frequency_factors", rope.frequency_factors),
        ):
            if factors is not None and len(factors) != self.rotary_dim // 2:
                raise ValueError(
                    f"{key} has {len(factors)} factors for {self.rotary_dim // 2} waves"
                )
            if factors is not None and not all(0 < factor < math.inf for factor in factors):
                raise ValueError(f"{key} has factors that are not positive numbers")

    @classmethod
    def read(cls, config: JsonObject) -> dict[str, Any]:
        require(config, hidden_act=cls.hidden_acts)
        n_heads = config.get("num_attention_heads")
        head_dim = config.get("head_dim")
        if head_dim is None:
            head_dim = default_head_dim(config.get("hidden_size"), n_heads)
        n_kv_heads = config.get("num_key_value_heads", cls.default_n_kv_heads)
        return {
            "n_kv_heads": n_heads if n_kv_heads is None else n_kv_heads,
            "head_dim": head_dim,
            "rope": read_rope(config, cls.default_rope_theta, cls.default_partial_rotary_factor),
        }


def read_rope(
    config: JsonObject, default_theta: float, default_partial: float | None = None
) -> JsonObject:
    """Returns the rotary settings of `config`, in either spelling, as fields of RopeConfig.

    `default_partial` is the fraction of a head that is rotated by default. It is None for families
    that rotate whole heads. Raises UnsupportedModel for settings that are not implemented.
    """
    given = {**(_settings_of(config, "rope_parameters") or _settings_of(config, "rope_scaling"))}
    rope_type = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if rope_type not in _ROPE_KEYS:
        raise UnsupportedModel(
            f"config.json: rope_type {rope_type!r} is not one of {[*_ROPE_KEYS]}"
        )
    partial = given.pop("partial_rotary_factor", None)
    partial = config.get("partial_rotary_factor") if partial is None else partial
    is_whole = default_partial is None and rope_type != "proportional"
    if is_whole and partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"config.json: partial_rotary_factor {partial!r} is not supported")
    said = (given.pop("rope_theta", None), config.get("rope_theta"), default_theta)
    theta = next(value for value in said if value is not None)
    needed, optional = _ROPE_KEYS[rope_type]
    _read_attn_factor(given, rope_type)
    # Some files have settings of other types, which other programs ignore, too.
    unknown = set(given) - {key for keys in _ROPE_KEYS.values() for key in (*keys[0], *keys[1])}
    if unknown:
        raise UnsupportedModel(f"config.json: unknown rotary settings {sorted(unknown)}")
    used = {key: given[key] for key in (*needed, *optional) if given.get(key) is not None}
    if "original_max_position_embeddings" in needed:
        used.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if rope_type == "longrope" and "factor" not in used:
        longest = config.get("max_position_embeddings")
        used["factor"] = longest / used["original_max_position_embeddings"]
    return {
        "rope_type": rope_type,
        "rope_theta": theta,
        "partial_rotary_factor": (default_partial or 1.0) if partial is None else partial,
        **used,
    }


def with_one_rope(config: JsonObject) -> JsonObject:
    """If `config` has rotary settings in both spellings, returns `config` with all of them under
    `rope_parameters`. Otherwise returns `config` itself. Raises UnsupportedModel for settings that
    contradict each other."""
    old, new = (_settings_of(config, key) for key in ("rope_scaling", "rope_parameters"))
    if not (old and new):
        return config
    # Files of families with two kinds of layers have settings for each kind in the newer spelling.
    of_full = new.get("full_attention")
    inner = of_full if isinstance(of_full, Mapping) else new
    one, other = _with_type(old), _with_type(inner)
    for key in sorted(one.keys() & other.keys()):
        if one[key] != other[key]:
            raise UnsupportedModel(
                f"config.json: rope_scaling and rope_parameters contradict each other: {key} is "
                f"{one[key]!r:.40} and {other[key]!r:.40}"
            )
    merged = {**one, **other}
    kept = {key: value for key, value in config.items() if key != "rope_scaling"}
    return kept | {"rope_parameters": merged if inner is new else {**new, "full_attention": merged}}


def _with_type(rope: JsonObject) -> dict[str, Any]:
    """Returns the rotary settings that are not null, with the key `rope_type` instead of `type`."""
    named = {("rope_type" if key == "type" else key): value for key, value in rope.items()}
    return {key: value for key, value in named.items() if value is not None}


def _settings_of(config: JsonObject, key: str) -> JsonObject:
    """Returns the rotary settings under `key`, or an empty mapping if there are none."""
    given = config.get(key)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UnsupportedModel(f"config.json: {key} is no object but of the wrong type: {given!r}")
    return given


def yarn_scale(factor: float, mscale: float) -> float:
    """Returns the factor by which "yarn" multiplies queries and keys to sharpen attention scores.

    `factor` is the factor by which the context is stretched, and `mscale` is the strength.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_attn_factor(given: dict[str, Any], rope_type: str) -> None:
    """Replaces `attn_factor` among the rotary settings of a file by an equivalent
    `attention_factor`.

    As in vLLM, the scale that follows from `factor` is multiplied by `attn_factor`. Some DeepSeek
    models use the key to cancel that scale; `transformers` ignores it.
    """
    times = given.pop("attn_factor", None)
    factor = given.get("factor")
    if times is None:
        return
    if rope_type != "yarn" or type(times) is not float or not isinstance(factor, int | float):
        raise UnsupportedModel(f"config.json: attn_factor {times!r:.40} is not supported")
    given.setdefault("attention_factor", times * yarn_scale(factor, 1.0))


def rope_of_kinds(both: Mapping[str, Any]) -> tuple[JsonObject, JsonObject]:
    """Splits `rope_parameters` with settings for two kinds of layers into two mappings: for full
    layers, and for sliding layers.

    Each mapping has the keys of a `config.json` whose layers are all of that kind. Raises
    UnsupportedModel for other kinds of layers.
    """
    if set(both) != {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"config.json: rope_parameters are those of {sorted(both)}, not of full_attention and "
            "sliding_attention"
        )
    return (
        {"rope_parameters": both["full_attention"]},
        {"rope_parameters": both["sliding_attention"]},
    )
