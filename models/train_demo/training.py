"""The training: settings, the rows of tokens, the schedule and the loop.

The schedule depends on the elapsed time, not on an estimated number of steps. So the learning rate
reaches its end with the end of the time, also on a shared machine.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import LlamaForCausalLM

from models.train_demo.chat import BOS, EOS, conversations
from models.train_demo.corpus import Document
from models.train_demo.model import MAX_CONTEXT, token_losses


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run."""

    out: Path
    minutes: float  # time of the training loop alone
    steps: int | None  # number of steps, which replaces `minutes`; None: `minutes` counts
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
    """A part of the run: the length of its rows, and the fastest attention for this length."""

    until: float  # share of the run after which the phase ends
    context: int
    attention: str


# Most documents are short, and short rows are cheap. The last phase trains the far positions.
PHASES = (
    Phase(until=0.85, context=256, attention="eager"),
    Phase(until=1.0, context=MAX_CONTEXT, attention="sdpa"),
)


class Rows:
    """An endless supply of rows of token ids. Each pass over the corpus shuffles the documents and
    chooses other wordings of the questions."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer, seed: int) -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.stream: list[int] = []

    def take(self, n_rows: int, context: int) -> torch.Tensor:
        """Returns the next rows, int64 [n_rows, context + 1]."""
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
    """Returns the learning rate at `progress`, the share of the run from 0 to 1: a linear warm-up,
    then a cosine to zero."""
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


@dataclass(slots=True)
class Measured:
    """The measurements of a run, for the model card."""

    n_steps: int = 0
    n_passes: float = 0.0
    train_s: float = 0.0
    bits_per_byte: float = 0.0
    xz_bits_per_byte: float = 0.0


class Trainer:
    """Trains one model; holds the optimizer and the time at which the run started."""

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
        """Runs one optimizer step; returns its loss in nats per token."""
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
        """Trains until the run is complete, and calls `on_tenth` after each tenth with the share of
        the run."""
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
