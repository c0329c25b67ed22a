"""Text and tokens: the checkpoint's tokenizer and chat template, and stop strings."""
