"""The training of the demo model `models/demo`, from the corpus to a checkpoint.

    __main__     the command: the steps in their order
    corpus       the prose of the Python standard library, cleaned
    chat         special tokens, the chat template, conversations made from the corpus
    tokenizer    a byte-level BPE, trained on the corpus
    model        a small Llama and its loss
    training     the rows of tokens, the schedule, the loop
    measuring    bits per byte and samples
    checkpoint   the files of the checkpoint
    model_card   README.md of the checkpoint

`make demo-model` runs it.
"""
