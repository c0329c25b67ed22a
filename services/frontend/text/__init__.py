"""Text and tokens: the checkpoint's tokenizer and chat template, stop strings, and what there is of
calls and reasoning in the text that a model writes, by family."""
