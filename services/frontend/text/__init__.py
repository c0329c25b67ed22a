"""Text and tokens: the tokenizer and the chat template of the checkpoint, stop strings, and the
formats in which families of models write tool calls and reasoning."""
