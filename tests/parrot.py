"""A parrot: a checkpoint that repeats an answer which the prompt contains.

The model is a GPT-2 with made-up weights. One attention head attends, by learned positions, to the
token a fixed distance back, and the output head predicts that token. If a prompt contains an answer
that begins at this distance from the end of the prompt, the model generates exactly this answer, at
every temperature, with its special tokens and the token that ends the turn. So any output can be
sent through the whole system.

There are two ways to place the answer. `Parrot.conversation` hides the answer in the first message
of a conversation. `tests.scripted_parrot` writes a chat template that contains all answers and
chooses one by the last messages, for clients that write their own prompts.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from tests.frontend.chat_templates import HERMES

START, END = "<|im_start|>", "<|im_end|>"
DISTANCE = 1024
"""Number of tokens from a token to its repetition, unless a parrot has another distance. An answer
and the text that the template writes after the first message may have at most this number of tokens
together."""

CODE_SIZE = 64
"""Size of the code of a token or a position. Half of the elements of a code are 1 and the others
are -1, so that layer norms change nothing."""
N_HEADS = 3
HIDDEN_SIZE = N_HEADS * CODE_SIZE
"""Size of the hidden state, which consists of three codes: of the token, of its position, and of
the position at which the token is repeated."""

SHARPNESS = 4.0
"""Factor of queries and keys. It is so large that the scores of two positions differ by at least
30."""
LOUDNESS = 16.0
"""Factor of the token to repeat in the hidden state. It outweighs the token that was read last."""

SENTINEL = "\ue000"
"""A character that no template writes."""

FILLER = "."


@dataclass(frozen=True, kw_only=True)
class Parrot:
    """A parrot's checkpoint, with methods that make prompts for given answers."""

    directory: Path
    tokenizer: tokenizers.Tokenizer
    template: str
    distance: int
    end: str
    """The text of the token that ends the turn."""

    def conversation(
        self,
        says: str,
        *,
        tail: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        ends: bool = True,
        **template_options: Any,
    ) -> list[dict[str, Any]]:
        """Returns the messages of a conversation to which the model answers `says`. The answer is
        hidden in the first message.

        `tail` has the messages after the first one. `tools` and `template_options` are further
        arguments of the template. All are in the form of Chat Completions. With `ends`, the answer
        ends with the token that ends a turn. Otherwise the model continues with filler.

        Raises:
            ValueError: the answer and the tail are longer than the distance.
        """
        opening = {"role": "user", "content": SENTINEL}
        rendered = render_jinja_template(
            [[opening, *map(dict, tail)]],
            tools=None if tools is None else [dict(tool) for tool in tools],
            chat_template=self.template,
            add_generation_prompt=True,
            **{"bos_token": "", "eos_token": self.end, **template_options},
        )[0]
        after = rendered[0].rpartition(SENTINEL)[2]
        content = "Say: " + self.prompt(says, after=after, ends=ends)
        return [{"role": "user", "content": content}, *map(dict, tail)]

    def prompt(self, says: str, *, after: str = "", ends: bool = True) -> str:
        """Returns a text that makes the model say `says` if the text is followed by `after`.

        Raises:
            ValueError: the answer and `after` are longer than the distance.
        """
        text = says + self.end * ends
        return padded(self.tokenizer, text, distance=self.distance, after=after)

    def body(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the body of a test case's request. In the body, the value "SAYS" is replaced by a
        conversation to which the model answers `says`, or by such a text if the key is `prompt`.

        A case has `body`, and may have `says` and `tail`.
        """
        body: dict[str, Any] = dict(case["body"])
        for key in [key for key, value in body.items() if value == "SAYS"]:
            if key == "prompt":
                body[key] = self.prompt(case["says"])
            else:
                body[key] = self.conversation(case["says"], tail=case.get("tail", ()))
        return body


def padded(tokenizer: tokenizers.Tokenizer, text: str, *, distance: int, after: str) -> str:
    """Returns `text` with filler after it, so that it begins `distance` tokens before the end of a
    prompt in which `after` follows.

    Raises:
        ValueError: `text` and `after` together are longer than the distance.
    """
    n_filler = distance - sum(len(tokenizer.encode(part).ids) for part in (text, after))
    if n_filler < 0:
        raise ValueError(f"the answer and what follows have {-n_filler} tokens too many")
    return text + FILLER * n_filler


def write_parrot(
    directory: Path,
    *,
    template: str = HERMES,
    special_tokens: Iterable[str] = (),
    added_tokens: Iterable[str] = (),
    ends: Sequence[str] = (END,),
    distance: int = DISTANCE,
    n_positions: int = 4 * DISTANCE,
) -> Parrot:
    """Writes the checkpoint of a parrot into `directory`, and returns the parrot.

    The vocabulary has a token for each byte, `special_tokens`, which are left out of the text of
    answers, and `added_tokens`, which are part of that text. `ends` are the special tokens that end
    a turn. The first of them ends the turns of `Parrot.conversation`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer([START, *ends, *special_tokens], added_tokens)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": ends[0], "chat_template": template}
    end_ids = [tokenizer.token_to_id(end) for end in ends]
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": tokenizer.get_vocab_size(),
        "n_positions": n_positions,
        "n_embd": HIDDEN_SIZE,
        "n_inner": N_HEADS,
        "n_layer": 2,
        "n_head": N_HEADS,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": end_ids[0],
        "eos_token_id": end_ids[0],
        "dtype": "float32",
    }
    for name, content in {
        "tokenizer_config.json": names,
        "config.json": config,
        "generation_config.json": {"eos_token_id": end_ids},
    }.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    weights = _weights(tokenizer.get_vocab_size(), n_positions, distance)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return Parrot(
        directory=directory,
        tokenizer=tokenizer,
        template=template,
        distance=distance,
        end=ends[0],
    )


def _tokenizer(special: Iterable[str], added: Iterable[str]) -> tokenizers.Tokenizer:
    """Returns a tokenizer without merges: it has one token for each byte, and the given tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(special)]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(added)])
    return tokenizer


def _codes(n: int, generator: torch.Generator) -> Tensor:
    """Returns `n` different codes, [n, CODE_SIZE]."""
    order = torch.rand(n, CODE_SIZE, generator=generator).argsort(dim=1)
    return (order < CODE_SIZE // 2).float() * 2 - 1


def _weights(vocab_size: int, n_positions: int, distance: int) -> dict[str, Tensor]:
    """Returns the weights of the model, by name. The second layer and the MLPs of both layers add
    nothing."""
    generator = torch.Generator().manual_seed(0)
    token, position, target = torch.arange(HIDDEN_SIZE).reshape(-1, CODE_SIZE)
    tokens = torch.zeros(vocab_size, HIDDEN_SIZE)
    tokens[:, token] = _codes(vocab_size, generator)
    # A token is repeated `distance` places on, so the model attends to the token from one before.
    codes = _codes(n_positions + distance, generator)
    positions = torch.zeros(n_positions, HIDDEN_SIZE)
    positions[:, position] = codes[:n_positions]
    positions[:, target] = codes[distance - 1 :][:n_positions]
    loud = torch.ones(HIDDEN_SIZE)
    weights = {
        "transformer.wte.weight": tokens,
        "transformer.wpe.weight": positions,
        "transformer.ln_f.weight": loud,
        "transformer.ln_f.bias": torch.zeros(HIDDEN_SIZE),
    }
    for layer in range(2):
        weights |= {
            f"transformer.h.{layer}.{name}": weight for name, weight in _quiet_layer().items()
        }
    identity = torch.eye(CODE_SIZE)
    attention = weights["transformer.h.0.attn.c_attn.weight"]  # [n_in, query, key and value]
    for first, source, factor in (
        (0, position, SHARPNESS),
        (HIDDEN_SIZE, target, SHARPNESS),
        (2 * HIDDEN_SIZE, token, 1.0),
    ):
        attention[source, first : first + CODE_SIZE] = factor * identity
    weights["transformer.h.0.attn.c_proj.weight"][token, :CODE_SIZE] = LOUDNESS * identity
    return weights


def _quiet_layer() -> dict[str, Tensor]:
    """Returns the weights, by name, of a layer that adds nothing to the hidden state."""
    linear = {
        "attn.c_attn": (HIDDEN_SIZE, 3 * HIDDEN_SIZE),
        "attn.c_proj": (HIDDEN_SIZE, HIDDEN_SIZE),
        "mlp.c_fc": (HIDDEN_SIZE, N_HEADS),
        "mlp.c_proj": (N_HEADS, HIDDEN_SIZE),
    }
    weights = {}
    for name, shape in linear.items():
        weights[f"{name}.weight"] = torch.zeros(shape)
        weights[f"{name}.bias"] = torch.zeros(shape[1])
    for name in ("ln_1", "ln_2"):
        weights[f"{name}.weight"] = torch.ones(HIDDEN_SIZE)
        weights[f"{name}.bias"] = torch.zeros(HIDDEN_SIZE)
    return weights
