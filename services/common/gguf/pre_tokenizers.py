"""The rules that divide a text into words before byte-level BPE, keyed by the value of the metadata
key `tokenizer.ggml.pre`.

A GGUF file names the rule of its tokenizer and does not contain it. The patterns here are copied
from the models' own `tokenizer.json`. Rules that differ between versions of a model have several
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_BYTES: Json = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_WORDS_OF_GPT2: Json = {**_BYTES, "use_regex": True}
_DIGITS: Json = {"type": "Digits", "individual_digits": True}

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NO_HAN = r"&&[^\p{Han}]"
_ANY_BUT_LETTERS = r"[^\r\n\p{L}\p{N}]?"
# The letters of deepseek-llm: all with upper and lower case, in the words of its tokenizer.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_HAN_OR_KANA = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_HAN_OR_HANGUL = "\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff"
_WIDE_SIGNS = "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"


def _cl100k(digits: str, *, marks: str = "", lines: str = r"\r\n") -> str:
    """Returns a variant of the pattern of OpenAI's cl100k. `digits` is the quantifier of digits in
    a number, `marks` are further characters that words may contain, and `lines` are the characters
    that may follow punctuation."""
    letters = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    return (
        rf"{_ENDINGS}|{_ANY_BUT_LETTERS}{letters}|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[{lines}]*{_SPACES}"
    )


def _cased(digits: str, *, endings: str = "", without: str = "", lines: str = r"\r\n/") -> str:
    """Returns a variant of the pattern of OpenAI's o200k, which starts a new word at a capital
    letter. `digits` is the quantifier of digits in a number, and `lines` are the characters that
    may follow punctuation. Words may end with `endings`. `without` is a set operation, in the
    syntax of regular expressions, that removes some letters from the letters of which words
    consist."""
    first = f"{_ANY_BUT_LETTERS}[{_CAPITALS}{without}]*[{_SMALL}{without}]+{endings}"
    second = f"{_ANY_BUT_LETTERS}[{_CAPITALS}{without}]+[{_SMALL}{without}]*{endings}"
    return rf"{first}|{second}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[{lines}]*{_SPACES}"


def _split(pattern: str) -> Json:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _cuts(*patterns: str) -> Json:
    """Returns a rule that divides a text by the first pattern, the parts by the second pattern, and
    so on."""
    return _sequence(*map(_split, patterns), _BYTES)


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A rule that divides a text into words, and further settings of tokenizers with this rule."""

    cut: Json
    is_composed: bool = False  # texts are brought into the form NFC
    ignores_merges: bool = False  # words that are tokens stay whole
    adds_bos: bool = False  # texts begin with a token for that unless the file says no


_GPT2 = PreTokenizer(_WORDS_OF_GPT2)
_SINGLE_DIGITS = PreTokenizer(_sequence(_DIGITS, _WORDS_OF_GPT2))
_LLAMA3 = PreTokenizer(_cuts(_cl100k("{1,3}")), ignores_merges=True, adds_bos=True)
_CL100K = PreTokenizer(_cuts(_cl100k("{1,3}")))
_QWEN2 = PreTokenizer(_cuts(_cl100k("")), is_composed=True)
_O200K = PreTokenizer(_cuts(_cased("{1,3}", endings=f"{_ENDINGS}?")))
_DEEPSEEK3 = PreTokenizer(
    _cuts(
        r"\p{N}{1,3}",
        f"[{_HAN_OR_KANA}]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_DEEPSEEK_CODER = PreTokenizer(
    _sequence(
        *map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{_HAN_OR_HANGUL}]+")),
        _DIGITS,
        _BYTES,
    )
)
_DEEPSEEK_LLM = PreTokenizer(
    _sequence(
        *map(
            _split,
            (
                r"[\r\n]",
                rf"\s?[{_CASED}]+",
                rf"\s?[!-/:-~{_WIDE_SIGNS}]+",
                r"\s+$",
                f"[{_HAN_OR_HANGUL}]+",
            ),
        ),
        _DIGITS,
        _BYTES,
    )
)
_KIMI = PreTokenizer(
    _cuts(r"[\p{Han}]+|" + _cased("{1,3}", endings=f"{_ENDINGS}?", without=_NO_HAN, lines=r"\r\n"))
)
_SEED_CODER = (
    rf"{_ENDINGS}|{_ANY_BUT_LETTERS}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}"
)
_EXAONE_MOE = (
    rf"{_ENDINGS}|{_ANY_BUT_LETTERS}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# What llama.cpp does with tokenizers of unknown rules.
_DEFAULT = PreTokenizer(
    _cuts(
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(
        (
            "exaone4", "gigachat", "gpt-2", "granite-docling", "mellum", "mpt", "olmo", "phi-2",
            "trillion",
        ),
        _GPT2,
    ),
    **dict.fromkeys(
        ("codeshell", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder"),
        _SINGLE_DIGITS,
    ),
    **dict.fromkeys(
        (
            "falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0",
            "pixtral",
        ),
        _LLAMA3,
    ),
    **dict.fromkeys(("chatglm-bpe", "dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(_CL100K.cut, ignores_merges=True)),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez", "qwen2"), _QWEN2),
    **dict.fromkeys(("grok-2", "hunyuan", "solar-open", "stablelm2"), PreTokenizer(_QWEN2.cut)),
    **dict.fromkeys(("gpt-4o", "kanana2", "llama4", "minimax-m2"), _O200K),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "command-r": PreTokenizer(_SINGLE_DIGITS.cut, is_composed=True),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "default": _DEFAULT,
    "exaone-moe": PreTokenizer(_cuts(_EXAONE_MOE)),
    "kimi-k2": _KIMI,
    "qwen35": PreTokenizer(_cuts(_cl100k("", marks=r"\p{M}")), is_composed=True),
    "seed-coder": PreTokenizer(_cuts(_SEED_CODER)),
    "tekken": PreTokenizer(_cuts(_cased("")), ignores_merges=True, adds_bos=True),
    "tiny_aya": PreTokenizer(
        _cuts(r"\d{1,3}(?=(?:\d{3})*\b)", _cased("{1,3}", endings=f"{_ENDINGS}?"))
    ),
}  # fmt: skip
