"""Tokenizers of GGUF files: texts are cut as the published tokenizers of the same name cut them."""

import json

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from services.common.gguf.pre_tokenizers import PRE_TOKENIZERS
from services.common.gguf.tokenizer import special_tokens, tokenizer_json

# What the models' own `tokenizer.json` cuts by, one pattern after the other.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
HAN_OR_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
HAN_OR_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
PUBLISHED: dict[str, tuple[str, ...]] = {
    "chatglm-bpe": (LLAMA3,),
    "command-r": (r"\p{N}", GPT2),
    "dbrx": (LLAMA3,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_OR_HANGUL, r"\p{N}"),
    "deepseek-r1-qwen": (QWEN2,),
    "deepseek-v3": (r"\p{N}{1,3}", HAN_OR_KANA, DEEPSEEK3),
    "exaone4": (GPT2,),
    "falcon3": (LLAMA3,),
    "glm4": (LLAMA3,),
    "gpt-2": (GPT2,),
    "gpt-4o": (GPT4O,),
    "kimi-k2": (KIMI,),
    "llama-bpe": (LLAMA3,),
    "llama4": (GPT4O,),
    "qwen2": (QWEN2,),
    "qwen35": (QWEN35,),
    "refact": (r"\p{N}", GPT2),
    "smollm": (r"\p{N}", GPT2),
    "starcoder": (r"\p{N}", GPT2),
    "tekken": (TEKKEN,),
}
TEXTS = (
    "",
    " ",
    "\n\n \t\n  x",
    "Hello, World's 1234567 apples!\r\nI'LL  go.",
    "HelloWORLDCase/path/to//file.py\n\n///\n",
    "größer Äpfel e\u0301 re\u0301sume\u0301 नमस्ते",
    "東京は晴れ、北京2024年。한국어 텍스트",
    "🙂🐋👩‍👩‍👧 \ufffd\u200b\u00a0half\u2009width",
    "x=3;y+=`z`$^|~<>[](){}#@%&*'\"\\",
    "½ ²³ Ⅻ ٣٤٥ 1,000.50 0x1F",
    "'s 'T 're'VE'M 'll'd don't DON'T",
    "    def f():\n        return 1  ",
)


def published(patterns: tuple[str, ...]) -> PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, last])


def ours(pre: str) -> PreTokenizer:
    whole = {"pre_tokenizer": PRE_TOKENIZERS[pre].cut, "model": {"type": "BPE", "vocab": {}}}
    found = Tokenizer.from_str(json.dumps({**whole, "model": {**whole["model"], "merges": []}}))
    cut: PreTokenizer | None = found.pre_tokenizer
    assert cut is not None
    return cut


@pytest.mark.parametrize("pre", PUBLISHED)
def test_texts_are_cut_as_the_published_tokenizer_cuts_them(pre: str) -> None:
    found, expected = ours(pre), published(PUBLISHED[pre])
    for text in TEXTS:
        assert found.pre_tokenize_str(text) == expected.pre_tokenize_str(text), text


def words(pre: str, text: str) -> list[str]:
    return [text[slice(*place)] for _, place in ours(pre).pre_tokenize_str(text)]


def test_words_are_those_that_a_reader_expects() -> None:
    assert words("tekken", "HelloWorld 123's") == ["Hello", "World", " ", "1", "2", "3", "'s"]
    assert words("gpt-4o", "HelloWorld's 1234") == ["Hello", "World's", " ", "123", "4"]
    assert words("llama-bpe", "HelloWorld's 1234") == ["HelloWorld", "'s", " ", "123", "4"]
    assert words("kimi-k2", "年a年") == ["年", "a", "年"]
    assert words("deepseek-llm", "ab c12 年") == ["ab", " c", "1", "2", " ", "年"]


def test_every_rule_can_be_read_and_loses_nothing() -> None:
    for pre in PRE_TOKENIZERS:
        for text in TEXTS:
            assert "".join(words(pre, text)) == text


def test_a_file_without_a_rule_is_refused_with_what_to_do() -> None:
    said = {"model": "gpt2", "tokens": ["a"], "merges": []}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    with pytest.raises(ValueError, match=r"pre is missing: .* take a newer one"):
        tokenizer_json(metadata)
    with pytest.raises(ValueError, match=r"pre 'falcon-x' is not one of \["):
        tokenizer_json(metadata | {"tokenizer.ggml.pre": "falcon-x"})


def test_sentencepiece_with_merges_falls_back_to_bytes() -> None:
    tokens = ["<unk>", "<bos>", "▁", "a", "b", "ab", "▁ab", *(f"<0x{n:02X}>" for n in range(256))]
    types = [2, 3, 1, 1, 1, 1, 1, *[6] * 256]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "▁ ab"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.mask_token_id": 5,
    }
    tokenizer = Tokenizer.from_str(tokenizer_json(metadata))
    ids = tokenizer.encode("ab ab é").ids
    assert ids == [1, 5, 6, 2, 7 + 0xC3, 7 + 0xA9]
    assert tokenizer.decode(ids) == "ab ab é"
    named = special_tokens(metadata)
    assert named == {"bos_token": "<bos>", "unk_token": "<unk>", "mask_token": "ab"}
