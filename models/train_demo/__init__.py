"""The training of the model in the box, `models/demo`, from nothing to a checkpoint.

    __main__     the command: the steps in their order
    corpus       the prose of the Python standard library, cleaned
    chat         special tokens, the chat template, conversations made of the corpus
    tokenizer    a byte-level BPE of the corpus
    model        a small Llama and its loss
    training     the rows it learns from, its schedule, the loop
    measuring    bits per byte and samples
    checkpoint   the files that are written
    model_card   README.md beside them

`make demo-model` runs it.
"""
