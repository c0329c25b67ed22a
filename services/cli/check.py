"""`orcinus check MODEL`: prints whether a checkpoint can be served, its properties and its memory.

The exit status is 0 if the checkpoint can be served with the given options. Otherwise it is 1, and
the output explains why. Only the headers of files are read, and no weights.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from services.cli.arguments import count, size
from services.cli.model import KINDS, find
from services.common.checkpoint_report import CheckpointReport
from services.common.ending import give_up
from services.common.pooling import PoolingSetting

INSPECTION_LIMIT_S = 300.0
DEFAULT_KV_MEMORY = "512MiB"  # the default of services.local
_KIB = 1024


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line of `orcinus check`."""
    made = argparse.ArgumentParser(
        prog="orcinus check", description="Says what would run of a checkpoint, and what not."
    )
    made.add_argument("model", metavar="MODEL", help=KINDS)
    made.add_argument("--stages", type=count, default=1, help="stages of the pipeline (1)")
    made.add_argument("--tp", type=count, default=1, help="ranks of a stage (1)")
    made.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    made.add_argument("--quantization", default="none", help="as for services.local")
    made.add_argument(
        "--load-format", choices=("safetensors", "random"), help="as for services.local"
    )
    made.add_argument(
        "--pooling", choices=get_args(PoolingSetting), default="", help="as for services.local"
    )
    made.set_defaults(load_format="safetensors")
    made.add_argument(
        "--kv-memory",
        type=size,
        default=DEFAULT_KV_MEMORY,
        help=f"memory for keys and values of each rank ({DEFAULT_KV_MEMORY})",
    )
    made.add_argument("--json", action="store_true", help="print everything as JSON")
    return made


def main(arguments: Sequence[str]) -> int:
    """Inspects a checkpoint and prints a report. Returns the exit status."""
    options = parser().parse_args(arguments)
    model = find(options.model)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "services.cli.inspection",
            str(model.path),
            *(f"--{name.replace('_', '-')}={getattr(options, name)}" for name in _PASSED),
            f"--kv-memory={options.kv_memory}",
        ],
        stdout=subprocess.PIPE,
        text=True,
        timeout=INSPECTION_LIMIT_S,
        check=False,
    )
    try:
        facts: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return give_up(f"the inspection ended with status {done.returncode}", ready_fd=None)
    facts["model"] = model.name or str(model.path)
    lines = [json.dumps(facts)] if options.json else report(facts, kv_memory=options.kv_memory)
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if facts["refused"] else 0


_PASSED = ("dtype", "load_format", "pooling", "quantization", "stages", "tp")


def report(facts: Mapping[str, Any], *, kv_memory: int) -> list[str]:
    """Returns the facts about a checkpoint as lines of text for a terminal. `kv_memory` is the K/V
    memory of each rank in bytes."""
    refused = facts["refused"]
    lines = [f"{facts['model']} can{'not' if refused else ''} be served"]
    rows: list[tuple[str, str]] = []
    for reason, advice in zip(refused, facts["advice"], strict=True):
        rows += [("refused", reason), ("what to do", advice)]
    if "family" in facts:
        rows += _model_rows(facts)
    if "rank_bytes" in facts:
        rows += _layout_rows(facts, kv_memory)
    if "tools" in facts:
        rows += _text_rows(facts)
    if facts.get("vectors"):
        rows.append(("vectors", _vectors(facts["vectors"])))
    rows += CheckpointReport.of_facts(facts).rows()
    return lines + [f"  {name:<14} {text}" for name, text in rows]


def _model_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    dtype = facts["dtype"]
    if dtype != facts["checkpoint_dtype"]:
        dtype += f" (the files have {facts['checkpoint_dtype']})"
    if facts["quantization"] != "none":
        dtype += f", matrices {facts['quantization']}"
    windows = ", ".join(f"{window:,}" for window in facts["windows"])
    n_state_bytes = facts["state_bytes_per_request"]
    state = f", and states of {human(n_state_bytes)} for each request" if n_state_bytes else ""
    return [
        ("family", facts["family"]),
        ("parameters", f"{counted(facts['n_parameters'])} in {facts['n_layers']} layers"),
        ("element type", dtype),
        ("K/V", f"{human(facts['kv_bytes_per_token'])} a token{state}"),
        *([("windows", f"some layers see the last {windows} tokens")] if windows else []),
        (
            "may be cut",
            f"into 1 to {facts['n_layers']} stages, of "
            f"{_either(facts['tp_sizes'])} rank{'s'[: facts['tp_sizes'] != [1]]} each",
        ),
    ]


def _layout_rows(facts: Mapping[str, Any], kv_memory: int) -> list[tuple[str, str]]:
    ranks = facts["rank_bytes"]
    weights = human(sum(ranks))
    if facts["load_format"] == "random":
        weights += " of random numbers"
    if len(ranks) > 1:
        weights += f" on {len(ranks)} ranks, {human(max(ranks))} on the largest"
    room = f"{facts['room_tokens']:,} tokens"
    if facts["room_requests"] is not None:
        room += f" and the states of {facts['room_requests']} requests at a time"
    return [
        ("weights", weights),
        ("room", f"{room} in {human(kv_memory)} of K/V on each rank"),
    ]


def _vectors(pooling: Mapping[str, Any]) -> str:
    """Returns a description in words of how a model makes embeddings or scores."""
    unit = ", of length 1" if pooling["is_normalised"] else ""
    what = f"{pooling['n_values']:,} numbers{unit}"
    if pooling["head"] != "none":
        what = "scores of pairs"
    whole = "; a text runs whole in one iteration" if pooling["runs_whole"] else ""
    return f"{what}, of {_STATES[pooling['kind']]}{whole}"


_STATES = {
    "last": "the state of the last token",
    "cls": "the state of the first token",
    "mean": "the mean of the states",
}


def _text_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    has_template = facts["has_chat_template"]
    vectors = facts.get("vectors")
    if vectors is not None and not vectors["generates"]:
        return [("tokenizer", facts["tokenizer"])]
    no_end = "" if facts.get("eos_token_ids", True) else ", and no token that ends an output"
    return [
        ("tokenizer", f"{facts['tokenizer']}{no_end}"),
        (
            "chat template",
            facts["chat_template_source"]
            if has_template
            else "none: it completes texts, and cannot chat",
        ),
        *([("tool calls", facts["tools"])] if has_template else []),
        ("reasoning", "<think>" if facts["thinks"] else "none"),
    ]


def counted(n: int) -> str:
    """Returns a large number as text with a word for its magnitude, such as "1.5 billion"."""
    for unit, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:,}"


def human(n_bytes: int) -> str:
    """Returns a number of bytes as text in the largest fitting binary unit, such as "1.5 GiB"."""
    n, unit = float(n_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if n < _KIB:
            break
        n, unit = n / _KIB, larger
    return f"{n:.0f} {unit}" if n >= 100 or unit == "bytes" else f"{n:.3g} {unit}"


def _either(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
