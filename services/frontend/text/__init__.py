"""Text and tokens: the checkpoint's tokenizer and chat template, stop strings, and the calls and the
reasoning in what a model writes, by family."""
