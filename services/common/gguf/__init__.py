"""GGUF, the format of llama.cpp: one file with the metadata, the vocabulary and the tensors of a
model.

`header.py` reads the metadata in front of the tensors. `model_config.py` converts the metadata to
the keys of `config.json`, and `tokenizer.py` converts the vocabulary to the form of
`tokenizer.json`. Only the workers read the tensors.
"""
