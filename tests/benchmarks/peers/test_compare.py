"""The comparison: its options, its table, and once the real thing."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine, records
from benchmarks.peers import compare, contest_table, contestants
from benchmarks.records import RunRecord
from tests.benchmarks.peers.test_contest import records_of

DEMO = machine.ROOT / "models" / "demo"

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


ANSWERS = TOKENS.flatmap(lambda tokens: st.tuples(st.just(tokens), st.permutations(tokens)))


@given(st.lists(ANSWERS, min_size=1))
def test_tokens_agree_up_to_the_first_that_differs(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    n_same = 0
    for mine, theirs in pairs:
        for a, b in zip(mine, theirs, strict=True):
            if a != b:
                break
            n_same += 1
    n_tokens = sum(len(mine) for mine, _ in pairs)

    all_mine, all_theirs = [mine for mine, _ in pairs], [theirs for _, theirs in pairs]
    assert compare.agreement(all_mine, all_theirs) == n_same / n_tokens


@pytest.mark.parametrize(
    ("given_options", "threads"),
    [("", "2"), ("--stages 2", "1"), ("--stages=2 --tp=2", "1"), ("--stages 2 --threads 5", "5")],
)
def test_ours_has_what_a_peer_has(given_options: str, threads: str) -> None:
    options = contestants.options_of_ours(given_options, model=DEMO, dtype="bf16", threads=2)

    found = re.findall(r"--threads[= ](\d+)", shlex.join(options))
    assert found == [threads]
    assert "--dtype=bfloat16" in options
    assert "--no-prefix-cache" in options, "all rounds have the same prompts"


@pytest.mark.parametrize(
    ("text", "rate"), [("offline", None), ("0.5x", 2.5), ("3.25", 3.25)], ids=lambda each: str(each)
)
def test_rates_are_of_requests_or_of_what_ours_can_do(text: str, rate: float | None) -> None:
    assert compare.rate_of(text, capacity=5.0) == rate


@pytest.mark.parametrize(
    "arguments",
    ["--peers llamacpp", "--peers vllm --peer openvino=--max-batch-size=8"],
    ids=["unknown", "not chosen"],
)
def test_a_peer_that_there_is_not_is_refused(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.parse(["--model", ".", *arguments.split()])
    assert re.search("no peer is called llamacpp|openvino is not among", capsys.readouterr().err)


def test_options_of_a_peer_are_its_own() -> None:
    given_for_vllm = ["--peer", "vllm=--eager --max-batch-size 8"]
    options = compare.parse(["--model", ".", "--peers", "transformers,vllm", *given_for_vllm])
    assert options.peer_options == {"vllm": ["--eager", "--max-batch-size", "8"]}


def run_of(engine: str, index: int, duration_s: float, *, is_disturbed: bool = False) -> RunRecord:
    meta = {"case": "offline", "rate": None, "engine": engine, "round": index}
    noise = {"other_cpus": 0.02, "is_disturbed": is_disturbed}
    return RunRecord({**meta, **noise}, records_of(duration_s))


def test_the_table_compares_pair_by_pair_and_with_the_best() -> None:
    runs = [run_of("ours", index, 1.0) for index in range(3)]
    runs += [run_of("vllm", 0, 2.0), run_of("vllm", 1, 9.0, is_disturbed=True)]
    runs += [run_of("vllm", 2, 2.0)]
    runs += [run_of("openvino", index, duration) for index, duration in enumerate((1.0, 9.0, 1.4))]

    title, header, *rows = contest_table.table("offline", runs).splitlines()

    assert title == "offline: median of 2 of 3 rounds"
    assert header.split()[0] == "tokens/s"
    cells = {row[:14].strip(): row[14:].split() for row in rows}
    assert list(cells) == ["ours", "vllm", "openvino", "best peer"]
    assert cells["ours"][0] == "10.0"
    assert cells["vllm"][:4] == ["5.0", "2.00", "x", "(2.00-2.00)"]
    assert cells["vllm"][-3:] == ["1", "of", "3"]
    assert cells["openvino"][:4] == ["8.6", "1.20", "x", "(1.00-1.40)"]
    assert cells["best peer"] == cells["openvino"][:-4]


@pytest.mark.system
@pytest.mark.thorough
def test_ours_and_a_peer_write_the_same_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # transformers is in our own environment, too: no other is needed to run its adapter.
    python = tmp_path / "transformers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "results.json"
    command = f"--model {DEMO} --dtype fp32 --peers transformers --rates offline,0.5x"
    command += f" --rounds 2 --repeats 0 --threads 1 --venvs {tmp_path} --out {out}"
    command += " --requests 6 --prompt-tokens 2-20 --output-tokens 1-8"
    command += " --ours=--kv-memory=16MiB"  # to fill what peers have would take most of the time

    assert compare.main(command.split()) == 0

    printed = capsys.readouterr().out
    assert "transformers: 100.0% of greedy tokens as ours" in printed
    assert re.search(r"offline: median of \d of 2 rounds", printed)
    runs = records.read(out)
    order = ["ours", "transformers", "transformers", "ours"]
    assert [run.meta["engine"] for run in runs] == order * 2
    lengths = [[record.n_output for record in run.requests] for run in runs]
    assert lengths == [lengths[0]] * 8
    assert runs[0].meta["rate"] is None
    assert runs[4].meta["rate"] > 0
