"""Low-rank adapters (LoRA) that requests may select, in the format of PEFT.

`adapter_config.py` reads an adapter's configuration, and `adapter.py` reads its tensors.
`adapted_tensors.py` is a source of a model's tensors that records which modules each matrix product
has, and adds a step after each product that an adapter changes. So model families need no code for
adapters. `text_files.py` compares an adapter's tokenizer and chat template with those of the model.
"""
