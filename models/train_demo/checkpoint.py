"""The checkpoint: the files that Orcinus, `transformers` and `tokenizers` load."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.train_demo.chat import ASSISTANT, BOS, CHAT_TEMPLATE, EOS, USER
from models.train_demo.model import MAX_CONTEXT


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": [USER, ASSISTANT],
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", config)


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the weights in bfloat16, config.json and generation_config.json.

    Role tokens also end an answer, because the model sometimes writes the user's next turn.
    """
    model.bfloat16().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    generation: dict[str, object] = {
        "bos_token_id": model.config.bos_token_id,
        "eos_token_id": [tokenizer.token_to_id(token) for token in (EOS, USER, ASSISTANT)],
        "pad_token_id": model.config.pad_token_id,
    }
    write_json(out / "generation_config.json", generation)


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
