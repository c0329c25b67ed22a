"""Train the model in the box: `python models/train_demo.py --out models/demo --minutes 38`.

One command from nothing to a checkpoint that Orcinus, `transformers` and `tokenizers` load:
collect the prose of the Python standard library, train a byte-level BPE on it, train a small
Llama for a fixed time, measure it on documents it never saw, write the model card.

The text is what every machine with Python has, so that nothing is downloaded: docstrings (read
from the source with `ast`, or from compiled modules at run time), the language reference that
`help()` shows, text files and longer comments. Each documented name also becomes a question and
an answer in the chat template. The result writes English and knows little; it exists so that a
server has something honest to serve. It is no benchmark of anything.
"""

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import logging
import lzma
import math
import platform
import pydoc_data.topics
import random
import re
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

logger = logging.getLogger("train_demo")

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, USER, ASSISTANT]
MAX_CONTEXT = 1024
HELD_OUT_PERCENT = 2
SAMPLE_TOKENS = 80  # at most, for each sample in the card

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}<|user|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|assistant|>{{ message.content }}{{ eos_token }}"
    # A model of this size cannot follow instructions: a system message is left out.
    "{% elif message.role != 'system' %}"
    "{{ raise_exception('unknown role: ' + message.role) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


# Settings


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run is asked to do."""

    out: Path
    minutes: float  # wall time of the training loop alone
    steps: int | None  # this many steps, however long they take, in place of a time
    threads: int
    seed: int
    vocab_size: int = 4096
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_share: float = 0.02  # share of the run in which the learning rate rises
    n_tokens_per_step: int = 2048


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the run: the length of its rows and the attention that is fastest for it."""

    until: float  # ends when this share of the run is done
    context: int
    attention: str


# Most documents are short, and short rows are cheap; the end teaches the far positions.
PHASES = (
    Phase(until=0.85, context=256, attention="eager"),
    Phase(until=1.0, context=MAX_CONTEXT, attention="sdpa"),
)


# The corpus


@dataclass(frozen=True, slots=True)
class Document:
    """A cleaned text and, where it explains something that has a name, that name."""

    text: str
    name: str | None = None

    @property
    def answer(self) -> str | None:
        """The first paragraph that says something, for the assistant's turn."""
        for paragraph in self.text.split("\n\n"):
            if len(paragraph.split()) >= 4 and paragraph[0].isupper():
                is_whole = len(paragraph) <= 700 and paragraph.endswith((".", "!", "?", ")"))
                return paragraph if is_whole else None
        return None

    @property
    def is_held_out(self) -> bool:
        """Fixed by the document's first paragraph, so that no copy of it is trained on."""
        opening = " ".join(self.text.split("\n\n")[0].lower().split())
        return int(hashlib.sha256(opening.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT


LEFT_OUT = {
    "site-packages", "dist-packages", "__pycache__", "__phello__", "_bundled",
    "test", "tests", "idle_test",
    "encodings",  # a hundred codecs with one and the same sentence
    "pydoc_data",  # read as topics below
}  # fmt: skip
PUBLIC_NAMES = {"builtins": "", "posix": "os", "nt": "os", "posixpath": "os.path"}
WELL_KNOWN = {
    "collections", "datetime", "functools", "itertools", "json", "logging", "math", "os",
    "pathlib", "random", "re", "string", "sys", "threading", "time",
    "bytes", "dict", "float", "int", "list", "set", "str", "tuple",
}  # fmt: skip
BULLET = re.compile(r"\s*([-*+o•]|\d+[.)]|\(\w\)|@\w+|:\w+|\S+ --?)\s")
RULE = re.compile(r"\s*[^\w\s]{3,}\s*")
CODE = re.compile(r"(?m)^\s*(?:def|class|import|from \w+ import|@)\b|[:;{]$| = ")
ROLE = re.compile(r":[\w:]+:`~?([^`]+)`")


def reflow(paragraph: str) -> str:
    """Join the lines that an editor wrapped; keep lists and other layouts as they are."""
    lines: list[str] = []
    width = 0
    for line in textwrap.dedent(paragraph).splitlines():
        is_wrapped = width >= 55 and not BULLET.match(line) and not lines[-1].endswith(":")
        if is_wrapped:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line.rstrip())
        width = len(line)
    return "\n".join(lines)


def is_prose(paragraph: str) -> bool:
    """Whether letters and ordinary punctuation carry it: no code, tables or doctests."""
    if ">>>" in paragraph or "::=" in paragraph or re.match(r"\s*[.$]{2,}", paragraph):
        return False
    n_plain = sum(char.isalpha() or char in " ,.'\n" for char in paragraph)
    code_lines = len(CODE.findall(paragraph))
    return n_plain / len(paragraph) >= 0.85 and code_lines * 3 <= len(paragraph.splitlines())


def clean(text: str) -> str:
    """Dedent, drop rules, code and tables, take the markup off, unwrap the paragraphs."""
    text = ROLE.sub(r"`\1`", inspect.cleandoc(text)).replace("``", "`").replace("::\n", ":\n")
    text = "\n".join("" if RULE.fullmatch(line) else line for line in text.splitlines())
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(reflow(p) for p in paragraphs if p.strip() and is_prose(p)).strip()


def source_files(stdlib: Path, suffixes: set[str]) -> Iterator[Path]:
    for path in sorted(stdlib.rglob("*")):
        if path.suffix in suffixes and not LEFT_OUT & set(path.relative_to(stdlib).parts):
            yield path


def docstrings(node: ast.AST, name: str) -> Iterator[Document]:
    """The docstrings at and under a node; names with a private part lend none."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield Document(text, None if "._" in f".{name}" else name)
    for child in ast.iter_child_nodes(node):
        inner = getattr(child, "name", None) if isinstance(child, ast.stmt) else None
        yield from docstrings(child, f"{name}.{inner}" if inner else name)


def comment_blocks(source: str) -> Iterator[Document]:
    """Runs of three or more comment lines."""
    for block in re.findall(r"(?m)(?:^[ \t]*#.*\n){3,}", source):
        yield Document("\n".join(re.sub(r"^\s*#+:? ?", "", line) for line in block.splitlines()))


def python_documents(stdlib: Path) -> Iterator[Document]:
    for path in source_files(stdlib, {".py"}):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            logger.info("not read: %s", path.name)
            continue
        module = ".".join(path.relative_to(stdlib).with_suffix("").parts).removesuffix(".__init__")
        yield from docstrings(tree, PUBLIC_NAMES.get(module, module))
        yield from comment_blocks(source)


def compiled_modules(stdlib: Path) -> set[str]:
    """Modules without Python source: their docstrings exist at run time only."""
    suffixes = tuple(EXTENSION_SUFFIXES)
    files = (path.name for path in stdlib.glob("lib-dynload/*") if path.name.endswith(suffixes))
    names = set(sys.builtin_module_names) | {name.split(".")[0] for name in files}
    return {name for name in names if "test" not in name and not name.startswith("_xx")}


def object_documents(owner: object, prefix: str) -> Iterator[Document]:
    for key, value in sorted(vars(owner).items()):
        text = inspect.getdoc(value) if callable(value) or inspect.isdatadescriptor(value) else None
        if key.startswith("_") or not text:
            continue
        name = f"{prefix}.{key}".strip(".")
        yield Document(text, name)
        if isinstance(value, type):
            yield from object_documents(value, name)


def compiled_documents(stdlib: Path) -> Iterator[Document]:
    for name in sorted(compiled_modules(stdlib)):
        try:
            module = importlib.import_module(name)
        except ImportError:
            logger.info("not built here: %s", name)
            continue
        public = PUBLIC_NAMES.get(name, name.lstrip("_"))
        if module.__doc__:
            yield Document(module.__doc__, name if public == name else None)
        yield from object_documents(module, public)


def other_documents(stdlib: Path) -> Iterator[Document]:
    """What `help()` shows about the language, and the text files beside the sources."""
    for name, text in sorted(pydoc_data.topics.topics.items()):
        yield Document(text, name)
    for path in source_files(stdlib, {".txt", ".rst"}):
        for section in re.split(r"\n\n\n+", path.read_text(encoding="utf-8", errors="replace")):
            yield Document(section)


def collect(stdlib: Path) -> list[Document]:
    """The cleaned corpus without repeats, in an order that depends on nothing but the text."""
    documents: dict[str, Document] = {}
    for source in (compiled_documents, python_documents, other_documents):
        for raw in source(stdlib):
            document = Document(clean(raw.text), raw.name)
            key = " ".join(document.text.lower().split())
            if len(key.split()) >= 6 and (key not in documents or not documents[key].name):
                documents[key] = document
    return [documents[key] for key in sorted(documents)]


# Chat

QUESTIONS = (
    "What does {} do?", "What is {}?", "Explain {}.", "Explain {}", "Tell me about {}.",
    "How does {} work?", "What does {} mean in Python?", "Describe {}.",
)  # fmt: skip
NO_NAME = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Good morning", "Hey"),
        "Hello. Ask me about a function or a module of the Python standard library.",
    ),
    (
        ("Who are you?", "What are you?", "What is Orcinus?", "What can you do?", "Help"),
        "I am the demonstration model of Orcinus. I am very small and I was trained on the "
        "documentation of the Python standard library, so do not believe what I say.",
    ),
    (
        ("Thanks", "Thank you", "Thank you!", "Thanks!", "Bye", "Goodbye"),
        "You are welcome.",
    ),
)


def question(name: str, rng: random.Random) -> str:
    return rng.choice(QUESTIONS).format(name + rng.choice(("", "", "()")) if "." in name else name)


def turns(documents: list[Document], rng: random.Random) -> list[str]:
    """Every question with its answer; well-known modules and the greetings come thrice."""
    rendered = []
    for document in documents:
        if document.name and document.answer:
            times = 3 if WELL_KNOWN & {document.name, document.name.split(".")[0]} else 1
            for _ in range(times):
                asked = question(document.name, rng)
                rendered.append(f"{USER}{asked}{ASSISTANT}{document.answer}{EOS}")
    for asked_words, answer in NO_NAME:
        rendered += [f"{USER}{asked}{ASSISTANT}{answer}{EOS}" for asked in asked_words] * 3
    return rendered


def conversations(documents: list[Document], rng: random.Random) -> list[str]:
    """Conversations of one to three turns, in the form that the chat template gives them."""
    remaining = turns(documents, rng)
    rng.shuffle(remaining)
    grouped = []
    while remaining:
        size = rng.choice((1, 1, 1, 2, 3))
        grouped.append(BOS + "".join(remaining[:size]))
        remaining = remaining[size:]
    return grouped


# The tokenizer


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE: every byte is in its alphabet, so that no text is unknown to it."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


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


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# The model


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Six layers cut into two, three or six equal stages, four K/V heads into four shards."""
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


# Training


class Rows:
    """Endless rows of token ids; every pass shuffles the documents and words the questions anew."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer, seed: int) -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.stream: list[int] = []

    def take(self, n_rows: int, context: int) -> torch.Tensor:
        """The next rows, int64 [n_rows, context + 1]."""
        n_tokens = n_rows * (context + 1)
        while len(self.stream) < n_tokens:
            self.stream += self.one_pass()
        taken, self.stream = self.stream[:n_tokens], self.stream[n_tokens:]
        return torch.tensor(taken).view(n_rows, context + 1)

    def one_pass(self) -> list[int]:
        texts = [BOS + document.text + EOS for document in self.documents]
        texts += conversations(self.documents, self.rng)
        self.rng.shuffle(texts)
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [token_id for encoding in encoded for token_id in encoding.ids]


def learning_rate(progress: float, settings: Settings) -> float:
    """Linear warm-up, then a cosine to nothing; progress goes from 0 to 1."""
    if progress < settings.warmup_share:
        return settings.learning_rate * progress / settings.warmup_share
    done = (progress - settings.warmup_share) / (1 - settings.warmup_share)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def make_optimizer(model: LlamaForCausalLM, settings: Settings) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    norms = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


def token_losses(model: LlamaForCausalLM, rows: torch.Tensor, reduction: str) -> torch.Tensor:
    """Cross entropy in nats of every token but the first of each row [n_rows, n_tokens]."""
    logits = model(input_ids=rows[:, :-1]).logits.float()
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


@dataclass(slots=True)
class Measured:
    """What the run turned out to be; the model card is written from it."""

    n_steps: int = 0
    n_passes: float = 0.0
    train_s: float = 0.0
    bits_per_byte: float = 0.0
    xz_bits_per_byte: float = 0.0


class Trainer:
    """One model, one optimizer and the clock that says how much of the run is done.

    The schedule follows the clock and not a guessed number of steps: on a shared machine the
    learning rate still reaches its end when the time does.
    """

    def __init__(self, model: LlamaForCausalLM, rows: Rows, settings: Settings) -> None:
        self.model = model
        self.rows = rows
        self.settings = settings
        self.optimizer = make_optimizer(model, settings)
        self.measured = Measured()
        self.started_s = time.monotonic()

    def progress(self) -> float:
        if self.settings.steps:
            return self.measured.n_steps / self.settings.steps
        return (time.monotonic() - self.started_s) / (60 * self.settings.minutes)

    def step(self, phase: Phase, progress: float) -> float:
        """One optimizer step; returns its loss in nats per token."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress, self.settings)
        rows = self.rows.take(self.settings.n_tokens_per_step // phase.context, phase.context)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = token_losses(self.model, rows, "mean")
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.measured.n_steps += 1
        return loss.item()

    def run(self, on_tenth: Callable[[float], None]) -> Measured:
        """Train until the run is done, calling back ten times on the way."""
        smooth, next_report = math.log(self.model.config.vocab_size), 0.1
        phases = iter(PHASES)
        phase = self.enter(next(phases))
        form = "{percentage:3.0f}%|{bar}| {elapsed}{postfix}"
        with tqdm(total=1.0, bar_format=form, mininterval=5) as bar:
            while (progress := self.progress()) < 1:
                if progress >= phase.until:
                    phase = self.enter(next(phases))
                smooth += 0.02 * (self.step(phase, progress) - smooth)
                bar.set_postfix(step=self.measured.n_steps, loss=f"{smooth:.3f}", refresh=False)
                bar.update(min(progress, 1.0) - bar.n)
                if progress >= next_report:
                    on_tenth(progress)
                    next_report += 0.1
        self.measured.train_s = time.monotonic() - self.started_s
        return self.measured

    def enter(self, phase: Phase) -> Phase:
        self.model.set_attn_implementation(phase.attention)
        return phase


# Measuring


@torch.inference_mode()
def bits_per_byte(
    model: LlamaForCausalLM, documents: list[Document], tokenizer: Tokenizer
) -> float:
    """Bits to predict each document and its end, over the bytes of the documents."""
    model.train(mode=False)
    nats, n_bytes = 0.0, 0
    for document in documents:
        ids = tokenizer.encode(BOS + document.text + EOS, add_special_tokens=False).ids
        n_bytes += len(document.text.encode())
        # A window shares its first token with the one before it, so that each is predicted once.
        for begin in range(0, len(ids) - 1, MAX_CONTEXT):
            window = torch.tensor([ids[begin : begin + MAX_CONTEXT + 1]])
            nats += token_losses(model, window, "sum").item()
    return nats / math.log(2) / n_bytes


def xz_bits_per_byte(documents: list[Document]) -> float:
    """What a general compressor makes of the same text, as a yardstick."""
    raw = "\n".join(document.text for document in documents).encode()
    return 8 * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)) / len(raw)


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, *, temperature: float
) -> str:
    """Continue a prompt that has its special tokens already; temperature 0 is greedy."""
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


# The model card

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
        # In a table even a quoted bar ends the cell.
        special=", ".join(f"`{token}`" for token in SPECIAL_TOKENS).replace("|", r"\|"),
        megabytes=sum(path.stat().st_size for path in settings.out.iterdir()) / 1e6,
        n_train=len(train),
        train_mb=n_bytes(train) / 1e6,
        n_held_out=len(held_out),
        held_out_kb=n_bytes(held_out) / 1e3,
        held_out_percent=HELD_OUT_PERCENT,
        n_questions=sum(bool(document.name and document.answer) for document in train),
        copyright=sys.copyright.splitlines()[0],
        command=f"python models/train_demo.py --out models/demo {options}",
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


def n_bytes(documents: list[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


# The command


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the weights in bfloat16, config.json and generation_config.json.

    A role token ends an answer as well: the model sometimes goes on with the user's next turn.
    """
    model.bfloat16().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    generation: dict[str, object] = {
        "bos_token_id": model.config.bos_token_id,
        "eos_token_id": [tokenizer.token_to_id(token) for token in (EOS, USER, ASSISTANT)],
        "pad_token_id": model.config.pad_token_id,
    }
    write_json(out / "generation_config.json", generation)


def train_demo(settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    settings.out.mkdir(parents=True, exist_ok=True)

    documents = collect(Path(sysconfig.get_paths()["stdlib"]))
    train = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    logger.info("%d documents, %d bytes to learn from", len(train), n_bytes(train))
    logger.info("%d documents, %d bytes held out", len(held_out), n_bytes(held_out))

    tokenizer = train_tokenizer([document.text for document in train], settings.vocab_size)
    save_tokenizer(tokenizer, settings.out)
    model = build_model(tokenizer)
    rows = Rows(train, tokenizer, settings.seed)
    n_tokens_per_pass = len(Rows(train, tokenizer, settings.seed).one_pass())
    logger.info("%d parameters, %d tokens a pass", n_parameters(model), n_tokens_per_pass)

    def report(progress: float) -> None:
        bits = bits_per_byte(model, held_out[::8], tokenizer)
        tqdm.write(f"{progress:.0%}: {bits:.3f} bits per byte on an eighth of the held-out text")

    measured = Trainer(model, rows, settings).run(report)
    save_model(model, tokenizer, settings.out)

    stored = LlamaForCausalLM.from_pretrained(settings.out, dtype=torch.float32)
    measured.bits_per_byte = bits_per_byte(stored, held_out, tokenizer)
    measured.xz_bits_per_byte = xz_bits_per_byte(held_out)
    measured.n_passes = measured.n_steps * settings.n_tokens_per_step / n_tokens_per_pass
    text = card(settings, measured, stored, tokenizer, train=train, held_out=held_out)
    (settings.out / "README.md").write_text(text, encoding="utf-8")
    logger.info("%.3f bits per byte after %.1f passes", measured.bits_per_byte, measured.n_passes)


def parse_settings() -> Settings:
    parser = argparse.ArgumentParser(description="Train the demonstration model of Orcinus.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--minutes", type=float, default=40.0, help="wall time of the training")
    parser.add_argument("--steps", type=int, help="train this many steps, however long it takes")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads that torch may use")
    parser.add_argument("--seed", type=int, default=0)
    return Settings(**vars(parser.parse_args()))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    train_demo(parse_settings())
