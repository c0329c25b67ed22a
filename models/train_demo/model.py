"""The model: a small Llama, and its loss on rows of tokens."""

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from models.train_demo.chat import BOS, EOS

MAX_CONTEXT = 1024


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Returns the model. It has six layers, for two, three or six equal stages, and four K/V heads,
    for four shards."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
        pad_token_id=tokenizer.token_to_id(EOS),
    )
    return LlamaForCausalLM(config)


def n_parameters(model: LlamaForCausalLM) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def token_losses(model: LlamaForCausalLM, rows: torch.Tensor, reduction: str) -> torch.Tensor:
    """Returns the cross entropy in nats of every token but the first of each row of int64 [n_rows,
    n_tokens]."""
    logits = model(input_ids=rows[:, :-1]).logits.float()
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)
