"""Low-rank adapters (LoRA) that requests may select, in the format of PEFT.

`adapter_files.py` reads an adapter's files, `adapter_config.py` parses the configuration, and
`adapter.py` gets the tensors, which `weights_header.py` finds in the file. `adapted_tensors.py` is
a source of a model's tensors that records, for each matrix product, the modules of which the matrix
is made. `adaptable_program.py` adds a step after each product that an adapter changes, at the start
or between two iterations. So model families need no code for adapters. `text_files.py` compares an
adapter's tokenizer and chat template with the model's.
"""
