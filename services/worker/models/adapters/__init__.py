"""Low-rank adapters (LoRA) that requests may select, in the format of PEFT.

`adapter_files.py` reads an adapter's files, `adapter_config.py` its configuration, and `adapter.py`
its tensors, which `weights_header.py` finds. `adapted_tensors.py` is a source of a model's tensors
that records of which modules the matrix of each product is made. `adaptable_program.py` adds a step
after each product that an adapter changes, from the start or between two iterations. So model
families need no code for adapters. `text_files.py` compares an adapter's tokenizer and chat
template with those of the model.
"""
