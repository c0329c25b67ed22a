"""The model card: README.md of the checkpoint, with measurements and samples."""

import platform
import sys
import textwrap

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.train_demo.chat import ASSISTANT, BOS, SPECIAL_TOKENS, USER
from models.train_demo.corpus import HELD_OUT_PERCENT, Document, n_bytes
from models.train_demo.measuring import SAMPLE_TOKENS, sample
from models.train_demo.model import n_parameters
from models.train_demo.training import PHASES, Measured, Settings

CARD = """\
---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The model in the box

A Llama of {millions:.1f} million parameters that writes recognisable English about Python.
It exists so that Orcinus can be tried, tested and shown without a download. It is good for
nothing else, and what it says about Python should not be believed.

| | |
|---|---|
| architecture | `LlamaForCausalLM`: {shape} |
| parameters | {parameters:,} |
| positions | {config.max_position_embeddings} |
| tokenizer | byte-level BPE, {config.vocab_size} tokens, four of them special: {special} |
| on disk | {megabytes:.1f} MB, bfloat16 |
| held-out bits per byte | **{measured.bits_per_byte:.3f}** |
| `xz -9e` on the same text | {measured.xz_bits_per_byte:.3f} bits per byte |

Equal pipeline stages: 2, 3 or 6. Tensor shards: 1, 2 or 4.

## Data

The prose of the standard library of CPython {python}: {n_train:,} documents of {train_mb:.2f} MB
to learn from, {n_held_out} documents of {held_out_kb:.0f} kB held out,
{held_out_percent} % by a hash of their first paragraph. They are docstrings of pure and of compiled
modules, the language reference behind `help()`, text files and longer comments. Tests, codecs and
installed packages are left out, and so are doctests, code and tables inside the text.

{n_questions:,} documents that explain a name are also asked for by that name, in the chat
template; the answer is their first paragraph. A few greetings are written by hand.

{copyright} The text is used under the
[PSF licence](https://docs.python.org/3/license.html), which permits derived works; that page also
names the contributions that came with notices of their own. What was changed: the text was
cleaned as above, and a model was trained on it. The checkpoint may be shared on the same terms.

## Training

```
{command}
```

{measured.n_steps:,} steps of {settings.n_tokens_per_step} tokens, or {measured.n_passes:.1f}
passes over the data, in {minutes:.0f} minutes on {settings.threads} CPU thread(s).
AdamW, peak learning rate {settings.learning_rate:g}, {warmup:.0f} % warm-up, cosine to zero,
gradients clipped at {settings.clip_norm:g}, seed {settings.seed}. Rows of {phases} of the time.
Python {python}, torch {torch}, transformers {transformers}, tokenizers {tokenizers}.

The schedule follows the clock, so that a second run gives a similar model and not the same one;
`--steps {measured.n_steps}` in place of `--minutes` repeats the number of steps.

Held-out bits per byte are measured on the bfloat16 weights as they are stored, each document
alone, its end token included. The library repeats itself: some held-out texts resemble texts
that were learned, which flatters the model a little.

## Limits

- It makes things up: names, arguments, return values. The grammar is often right, the content
  rarely. Asked what a function does, it mostly describes another one.
- At temperature 0 it repeats itself; from 0.8 on it also invents words. About 0.7 reads best.
- It ends most answers by itself. Now and then it writes a role token in the middle of one: that
  ends the answer too (`generation_config.json`), and cuts it short.
- It has seen English about Python and nothing else. It accepts any UTF-8 text, and answers other
  languages, code and general questions with nonsense.
- It does not follow instructions. The chat template leaves a system message out.
- Most rows that it learned from had {short_context} tokens: over longer texts it loses the thread.

## Samples

Not chosen: what came first with the seed, at most {sample_tokens} new tokens.

{samples}
"""

COMPLETION_PROMPTS = (
    "Return the",
    "This module provides",
    "If the file does not exist,",
    "The string is",
)
CHAT_PROMPTS = (
    "Hello",
    "What does json.dumps do?",
    "Explain str.split.",
    "What is threading.Lock?",
    "What does os.path.join do?",
)


def samples_section(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int) -> str:
    torch.manual_seed(seed)
    prompts = [(text, BOS + text) for text in COMPLETION_PROMPTS]
    prompts += [(text, f"{BOS}{USER}{text}{ASSISTANT}") for text in CHAT_PROMPTS]
    blocks = []
    for number, (shown, prompt) in enumerate(prompts):
        kind = "completion" if number < len(COMPLETION_PROMPTS) else "chat"
        blocks.append(f"### {kind}: {shown}\n")
        for temperature in (0.0, 0.8):
            text = sample(model, tokenizer, prompt, temperature=temperature)
            label = f"temperature {temperature:g}"
            blocks.append(f"{label}:\n\n{textwrap.indent(text, '    ')}\n")
    return "\n".join(line.rstrip() for line in "\n".join(blocks).splitlines())


def card(
    settings: Settings,
    measured: Measured,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    *,
    train: list[Document],
    held_out: list[Document],
) -> str:
    budget = f"--steps {settings.steps}" if settings.steps else f"--minutes {settings.minutes:g}"
    options = f"{budget} --threads {settings.threads} --seed {settings.seed}"
    config = model.config
    return CARD.format(
        settings=settings,
        measured=measured,
        config=config,
        parameters=n_parameters(model),
        millions=n_parameters(model) / 1e6,
        shape=f"{config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"{config.num_attention_heads} query heads over {config.num_key_value_heads} K/V heads, "
        f"feed-forward {config.intermediate_size}, tied embeddings",
        # In a table a vertical bar ends the cell even if it is quoted.
        special=", ".join(f"`{token}`" for token in SPECIAL_TOKENS).replace("|", r"\|"),
        megabytes=sum(path.stat().st_size for path in settings.out.iterdir()) / 1e6,
        n_train=len(train),
        train_mb=n_bytes(train) / 1e6,
        n_held_out=len(held_out),
        held_out_kb=n_bytes(held_out) / 1e3,
        held_out_percent=HELD_OUT_PERCENT,
        n_questions=sum(bool(document.name and document.answer) for document in train),
        copyright=sys.copyright.splitlines()[0],
        command=f"python -m models.train_demo --out models/demo {options}",
        minutes=measured.train_s / 60,
        warmup=100 * settings.warmup_share,
        phases=", then ".join(f"{p.context} tokens until {100 * p.until:.0f} %" for p in PHASES),
        short_context=PHASES[0].context,
        sample_tokens=SAMPLE_TOKENS,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
        samples=samples_section(model, tokenizer, settings.seed),
    )
