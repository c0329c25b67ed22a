"""Texts that tokenizers get wrong, and texts to train small vocabularies with."""

STRANGE = [
    "",
    " ",
    "  leading and   many    spaces  ",
    "\n\n\ttabs\r\nand lines\u2028",
    "don't we'll THEY'RE 12345 3.14e-10",
    "größer, naïve, Ελληνικά, русский, עברית, العربية",
    "漢字とかなカナ 한국어",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f1e9\U0001f1ea👍🏽",
    "\x00\x01\x1b[0m\x7f\ufeff\u200b\ufffd",
    "e\u0301 \u212b \ufb01 \u1e9b\u0323",
    "<s>[INST]a[/INST]</s> <unk> <|endoftext|>x<|im_end|>",
    "▁▁a ▁ b",
    "a" * 300,
    "x  y   z    w",
]

TRAINING = [
    "the quick brown fox jumps over the lazy dog, and they'll do it again in 1234 days",
    "größer naïve größer naïve 漢字 漢字 of the the the  of   it  it",
    "x = y + z;\n    return x\n    return y\n\n\tdone",
] * 8
