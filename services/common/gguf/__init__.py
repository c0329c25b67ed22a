"""GGUF, the one file that llama.cpp keeps a model in: metadata, vocabulary and tensors.

`header.py` reads what stands in front of the tensors, `model_config.py` says it in the words of
`config.json`, and `tokenizer.py` in those of `tokenizer.json`. The tensors are for the workers.
"""
