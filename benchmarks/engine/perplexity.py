"""The perplexity of a text for a checkpoint on this engine, and on llama.cpp for the same GGUF
file.

    python -m benchmarks.peers.install llama_cpp
    python -m benchmarks.engine.perplexity FILE.gguf --peer
    python -m benchmarks.engine.perplexity DIR

The text is this project's documentation, which no checkpoint has been trained on. This project's
tokenizer turns the paragraphs of the text into tokens one by one; both engines score the same
windows of these tokens. This engine's perplexity is measured through the whole service over HTTP:
each window is a prompt whose log-probabilities are requested (`prompt_logprobs`). The first token
of a window has no log-probability.
"""

import argparse
import asyncio
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tqdm import tqdm

from benchmarks.local_system import System, running
from benchmarks.machine import ROOT
from benchmarks.peers.catalogue import DEFAULT_VENVS, PEERS

TIMEOUT_S = 600.0
AT_ONCE = 4
"""Number of windows that are in flight at a time."""


def call(system: System, path: str, body: dict[str, Any]) -> Any:
    """Sends a POST request with a JSON body and returns the parsed response."""
    request = Request(
        system.http + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)


def tokens_of(system: System, text: str) -> list[int]:
    """Returns the tokens of a text. Each paragraph is tokenized by itself, since a whole text is
    longer than any context."""
    found: list[int] = []
    for paragraph in re.split(r"(?<=\n\n)", text):
        body = {"model": system.model, "prompt": paragraph, "add_special_tokens": False}
        found += call(system, "/tokenize", body)["tokens"]
    return found


def windows_of(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    """Returns consecutive windows of exactly `size` tokens. The tokens after the last whole window
    are dropped.

    Raises ValueError if there is no whole window.
    """
    windows = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    if not windows:
        raise ValueError(f"the text has {len(tokens)} tokens, less than a window of {size}")
    return windows


def our_logprob(system: System, window: Sequence[int]) -> float:
    """Returns the sum of the log-probabilities that the service returns for a window's tokens,
    without the first token."""
    body = {"prompt": window, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
    (choice,) = call(system, "/v1/completions", {"model": system.model, **body})["choices"]
    found = choice["prompt_logprobs"][1:]
    return sum(
        float(each[str(token)]["logprob"]) for token, each in zip(window[1:], found, strict=True)
    )


async def ours(
    model: Path, text: str, size: int, *, options: Sequence[str]
) -> tuple[list[Sequence[int]], float]:
    """Starts a service for the checkpoint `model`. Returns the windows of `size` tokens of `text`,
    and the sum of the service's log-probabilities over all windows."""
    async with running([f"--model={model}", *options]) as system:

        def scored() -> tuple[list[Sequence[int]], float]:
            windows = windows_of(tokens_of(system, text), size)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                logprobs = pool.map(lambda window: our_logprob(system, window), windows)
                return windows, sum(tqdm(logprobs, "ours", len(windows), leave=False))

        return await asyncio.to_thread(scored)


def theirs(model: Path, windows: Sequence[Sequence[int]], *, venvs: Path, threads: int) -> float:
    """Returns the sum of llama.cpp's log-probabilities over all windows."""
    command = [
        str(PEERS["llama_cpp"].python(venvs)),
        *("-m", "benchmarks.peers.llama_cpp_score", f"--model={model}"),
        *(f"--max-tokens={len(windows[0])}", f"--threads={threads}"),
    ]
    lines = "".join(f"{json.dumps(list(window))}\n" for window in windows)
    done = subprocess.run(command, cwd=ROOT, input=lines, stdout=subprocess.PIPE, text=True)
    done.check_returncode()
    return sum(float(json.loads(line)["logprob"]) for line in done.stdout.splitlines())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine.perplexity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="a checkpoint, or a GGUF file")
    parser.add_argument("--text", type=Path, nargs="+", help="files; default: README and docs")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--peer", action="store_true", help="ask llama.cpp too")
    parser.add_argument("--dtype", default="auto", help="of ours, as services.local has it")
    parser.add_argument("--quantization", default="none", help="of ours, likewise")
    parser.add_argument("--activations", default="rounded", help="of our workers")
    parser.add_argument("--threads", type=int, default=2, help="of each")
    parser.add_argument("--venvs", type=Path, default=DEFAULT_VENVS, help="where peers are")
    given = parser.parse_args(arguments)
    files = given.text or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(path.read_text() for path in files)
    model = given.model.resolve()
    options = [f"--{name}={getattr(given, name)}" for name in ("dtype", "quantization", "threads")]
    options.append(f"--worker=activations={given.activations}")
    windows, logprob = asyncio.run(ours(model, text, given.window, options=options))
    n_tokens = sum(len(window) - 1 for window in windows)
    mine = math.exp(-logprob / n_tokens)
    print(f"{n_tokens} tokens in windows of {given.window}; perplexity of ours {mine:.4f}")
    if given.peer:
        other = theirs(model, windows, venvs=given.venvs, threads=given.threads)
        peer = math.exp(-other / n_tokens)
        print(f"llama.cpp's {peer:.4f}; ours is {mine / peer:.4f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
