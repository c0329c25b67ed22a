"""Trains the demo model: `python -m models.train_demo --out models/demo --minutes 38`.

The command makes a checkpoint that Orcinus, `transformers` and `tokenizers` load. Its steps are:
collect the prose of the Python standard library, train a byte-level BPE on the prose, train a small
Llama for a fixed time, measure the model on held-out documents, write the model card.

The model writes English and knows little. Its purpose is to give a server a real model to serve;
it is not a benchmark.
"""

import argparse
import logging
import sysconfig
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM

from models.train_demo.checkpoint import save_model, save_tokenizer
from models.train_demo.corpus import collect, n_bytes
from models.train_demo.measuring import bits_per_byte, xz_bits_per_byte
from models.train_demo.model import build_model, n_parameters
from models.train_demo.model_card import card
from models.train_demo.tokenizer import train_tokenizer
from models.train_demo.training import Rows, Settings, Trainer

log = logging.getLogger("models.train_demo")


def train_demo(settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    settings.out.mkdir(parents=True, exist_ok=True)

    documents = collect(Path(sysconfig.get_paths()["stdlib"]))
    train = [document for document in documents if not document.is_held_out]
    held_out = [document for document in documents if document.is_held_out]
    log.info("%d documents, %d bytes to learn from", len(train), n_bytes(train))
    log.info("%d documents, %d bytes held out", len(held_out), n_bytes(held_out))

    tokenizer = train_tokenizer([document.text for document in train], settings.vocab_size)
    save_tokenizer(tokenizer, settings.out)
    model = build_model(tokenizer)
    rows = Rows(train, tokenizer, settings.seed)
    n_tokens_per_pass = len(Rows(train, tokenizer, settings.seed).one_pass())
    log.info("%d parameters, %d tokens a pass", n_parameters(model), n_tokens_per_pass)

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
    log.info("%.3f bits per byte after %.1f passes", measured.bits_per_byte, measured.n_passes)


def parse_settings() -> Settings:
    parser = argparse.ArgumentParser(
        prog="python -m models.train_demo",
        description="Trains the demonstration model of Orcinus.",
    )
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
