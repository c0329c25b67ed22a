"""Small checkpoints for tests, with only the files that a frontend reads."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.frontend.text.tokenizer import Tokenizer

BOS, EOS = "<|bos|>", "<|eos|>"

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello wörld, hello 世界",
    "once upon a time there was a small whale",
] * 4

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer that puts a token in front of texts, as many checkpoints
    do."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """Returns a WordPiece tokenizer as BERT has one: lower case, special tokens around texts, and
    types that tell the texts of a pair apart."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.enable_truncation(8)  # files of checkpoints have such settings, which are for others
    tokenizer.enable_padding(length=8)
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Returns a tokenizer as SentencePiece makes them: a mark stands before each word, the first
    space of a text is dropped, and unknown characters become bytes."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += ["▁", *"abcdehlorw", "▁h", "el", "lo", "▁hel", "▁hello", "▁w", "or", "▁wor"]
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁h", "el"), ("▁hel", "lo"), ("▁", "w")]
    merges += [("o", "r"), ("▁w", "or")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Returns a tokenizer whose decoder treats the first token in a special way."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", BOS, EOS], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_checkpoint(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Writes the files that a frontend reads, with the byte-level tokenizer. Returns the
    tokenizer."""
    byte_level().save(str(directory / "tokenizer.json"))
    config = {"bos_token": {"content": BOS}, "eos_token": EOS, "chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return Tokenizer.from_directory(directory)
