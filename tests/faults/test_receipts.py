"""Receipts of a system whose processes are killed are all verified.

    make test-receipts RECEIPTS_N=10000 KILLS=50
    FAULTS_SEED=7 make test-receipts RECEIPTS_N=200 KILLS=3

The system has little memory, so requests are preempted, and it drafts. Its requests are of all
kinds, mixed in batches. `orcinus verify` computes all answers again in processes of its own, on
another number of stages, undisturbed.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest

from services.receipts.keys import new_key
from tests.adapters import write_adapter
from tests.checkpoints import Oracle
from tests.faults.checker import End, Failure
from tests.faults.client import Clients, Log
from tests.faults.counters import Counters
from tests.faults.crowd import Crowd
from tests.faults.nemesis import Nemesis, NoRecovery, draw_faults
from tests.faults.signed_workload import ADAPTER, signed_questions
from tests.faults.tree import Shape, Tree, growing
from tests.system.conftest import write_model
from tests.system.stack import ROOT

N_RECEIPTS = int(os.environ.get("RECEIPTS_N") or 200)
N_KILLS = int(os.environ.get("KILLS") or 3)
SEED = int(os.environ.get("FAULTS_SEED") or SystemRandom().randrange(10**6))
OUT = Path(os.environ.get("RECEIPTS_OUT") or ROOT / "build" / "receipts.json")

N_STREAMS = 48
SHAPE = Shape(n_pipelines=1, n_stages=2, tp_size=1, n_spares=1)
KV_MEMORY = "384KiB"
"""Far less than the requests of a batch need at their full lengths."""
COUNTERS = ("orcinus_preemptions_total", "orcinus_drafted_tokens_total")
RECOVERY_LIMIT_S = 300.0
"""Seconds within which the system must serve again after a kill. Other tests have tight limits."""
FINISH_S = 180.0
"""Seconds for the requests that still run when there are enough receipts."""
SECONDS_PER_RECEIPT = 1.0
"""Seconds allowed for making and verifying an answer: far more than are needed."""


async def collected(tree: Tree, clients: Clients) -> dict[str, Any]:
    """Asks for answers with receipts while processes are killed, until there are enough of both.
    Returns the counts of what happened."""
    log, random = clients.log, Random(SEED)
    crowd = Crowd(clients, signed_questions(random))
    counters = Counters(tree, "scheduler", COUNTERS)
    counting = asyncio.create_task(counters.scrape_all_the_time())
    begun_s = time.monotonic()
    asking = [asyncio.create_task(crowd.ask_all_the_time()) for _ in range(N_STREAMS)]
    nemesis = Nemesis(tree, log, Random(SEED), recovery_limit_s=RECOVERY_LIMIT_S)
    faults = draw_faults(Random(SEED), N_KILLS, SHAPE, kinds=["kill"])
    try:
        await nemesis.run(faults, tell=lambda line: print(line, flush=True))
    except NoRecovery as error:  # too few kills; the receipts so far are verified
        print(f"no recovery: {error}\n{''.join(tree.stack.output[-50:])}", flush=True)
    deadline = time.monotonic() + N_RECEIPTS * SECONDS_PER_RECEIPT
    while len(log.receipts) < N_RECEIPTS and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    crowd.is_over = True
    await asyncio.wait(asking, timeout=FINISH_S)
    for task in (*asking, counting):
        task.cancel()
    await asyncio.gather(*asking, counting, return_exceptions=True)
    took_s = round(time.monotonic() - begun_s, 1)
    return {
        "n_kills": sum(one.fault.kind == "kill" for one in nemesis.injected),
        "n_resumed": log.n_resumed,
        **counters.totals,
        "took_s": took_s,
    }


async def verified(receipts: Path, model: Path, *options: str) -> list[dict[str, Any]]:
    """Runs `orcinus verify`, and returns its verdicts."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "verify", str(receipts), f"--model={model}"),
        *("--json", "--weight-cache=off", *options),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    return [json.loads(line) for line in printed.splitlines()]


def write(report: dict[str, Any]) -> None:
    """Writes the record of a run, and prints it."""
    text = json.dumps(report, indent=1)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(text + "\n")
    print(text, flush=True)


@pytest.mark.faults
@pytest.mark.timeout(600 + 60 * N_KILLS + 3 * N_RECEIPTS * SECONDS_PER_RECEIPT)
async def test_receipts_of_a_disturbed_system_are_all_verified(tmp_path: Path) -> None:
    print(f"\nFAULTS_SEED={SEED} RECEIPTS_N={N_RECEIPTS} KILLS={N_KILLS} repeats it", flush=True)
    model = write_model(tmp_path / "model", num_hidden_layers=4)
    adapter = write_adapter(tmp_path / "adapter", Oracle(model).model, ("q_proj", "v_proj"))
    keys, file = tmp_path / "keys.pem", tmp_path / "receipts.jsonl"
    keys.write_bytes(new_key())
    adapters = f"--adapters={ADAPTER}={adapter}"
    with growing(
        model,
        SHAPE,
        tmp_path,
        kv_memory=KV_MEMORY,
        adapters=f"{ADAPTER}={adapter}",
        receipts="on_request",
        receipt_keys_file=keys,
        scheduler="admission=optimistic,speculative-batch-tokens=64",
    ) as tree:
        clients = Clients(tree.stack.http, tree.stack.grpc, Log())
        try:
            counts = await collected(tree, clients)
        finally:
            await clients.close()
    log = clients.log
    ends = {event.stream for event in log.events if isinstance(event, End)}
    failures = [event for event in log.events if isinstance(event, Failure)]
    file.write_text("".join(json.dumps(one) + "\n" for one in log.receipts.values()))
    begun_s = time.monotonic()
    verdicts = await verified(file, model, adapters, f"--keys={keys}")
    kinds = Counter(stream.request.partition(" #")[0] for stream in log.receipts)
    report = {
        "seed": SEED,
        "n_receipts": len(log.receipts),
        "n_tokens": sum(len(one["tokens"]) for one in log.receipts.values()),
        "n_with_given_tokens": sum(one["n_given"] > 0 for one in log.receipts.values()),
        **counts,
        "kinds": dict(sorted(kinds.items())),
        "verdicts": dict(Counter(f"{it['outcome']}, {it['signature']}" for it in verdicts)),
        "verify_s": round(time.monotonic() - begun_s, 1),
    }
    write(report)
    wrong = [it for it in verdicts if (it["outcome"], it["signature"]) != ("same", "valid")]
    for verdict, receipt in itertools.islice(
        (pair for pair in zip(verdicts, log.receipts.items(), strict=True) if pair[0] in wrong), 10
    ):
        print(verdict, receipt, flush=True)
    assert not failures
    assert log.receipts.keys() == ends
    assert not wrong
    assert len(verdicts) == len(log.receipts) >= N_RECEIPTS
    assert counts["n_kills"] >= N_KILLS
    assert counts["orcinus_preemptions_total"] > 0
    assert counts["orcinus_drafted_tokens_total"] > 0
