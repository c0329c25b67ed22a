"""Measurements of the trained model: bits per byte on held-out documents, and samples."""

import lzma
import math

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.train_demo.chat import BOS, EOS
from models.train_demo.corpus import Document
from models.train_demo.model import MAX_CONTEXT, token_losses

SAMPLE_TOKENS = 80
"""Largest number of new tokens of a sample."""


@torch.inference_mode()
def bits_per_byte(
    model: LlamaForCausalLM, documents: list[Document], tokenizer: Tokenizer
) -> float:
    """Returns the number of bits for predicting all documents and their ends, divided by the number
    of bytes of the documents."""
    model.train(mode=False)
    nats, n_bytes = 0.0, 0
    for document in documents:
        ids = tokenizer.encode(BOS + document.text + EOS, add_special_tokens=False).ids
        n_bytes += len(document.text.encode())
        # The first token of a window is the last one of the previous window, so that each token is
        # predicted once.
        for begin in range(0, len(ids) - 1, MAX_CONTEXT):
            window = torch.tensor([ids[begin : begin + MAX_CONTEXT + 1]])
            nats += token_losses(model, window, "sum").item()
    return nats / math.log(2) / n_bytes


def xz_bits_per_byte(documents: list[Document]) -> float:
    """Returns the bits per byte of the compressor xz on the documents, for comparison."""
    raw = "\n".join(document.text for document in documents).encode()
    return 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw)


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, *, temperature: float
) -> str:
    """Returns the continuation of a prompt that contains its special tokens. Temperature 0 takes
    the argmax."""
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    n_prompt = len(ids)
    while len(ids) < n_prompt + SAMPLE_TOKENS:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        if temperature:
            chosen = torch.multinomial((logits / temperature).softmax(dim=-1), 1)
        else:
            chosen = logits.argmax()
        ids.append(int(chosen.item()))
        if ids[-1] == model.config.eos_token_id:
            break
    return str(tokenizer.decode(ids[n_prompt:]))
