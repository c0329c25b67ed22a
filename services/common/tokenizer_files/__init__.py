"""The files of a checkpoint that hold its tokenizer, in the form of `tokenizer.json`.

`find.py` determines which file of a checkpoint is the tokenizer, and reads it. If the checkpoint
has no `tokenizer.json`, another file is translated: `tekken.py` reads Mistral's own `tekken.json`,
`sentence_piece.py` reads a `tokenizer.model`, `tiktoken_file.py` reads Kimi's `tiktoken.model`, and
`bpe_files.py` reads `vocab.json` with `merges.txt`. `named_tokens.py` reads further files in the
tokenizer's directory that name tokens.
"""
