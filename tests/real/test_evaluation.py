"""`lm_eval` finds the same log-likelihoods over the completions API as with `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import MODEL, Clients
from tests.system.stack import Stack

TOLERANCE = 1e-3
TASK = "continuations"
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome", " a city in Spain"]},
    {"question": "The opposite of hot is", "choices": [" cold", " warm weather", " Größe"]},
    {"question": "Whales live in the", "choices": [" ocean", " mountains", " sky above us"]},
    {"question": "def add(a, b):\n    return", "choices": [" a + b", " a - b", "\n\n"]},
]
"""Questions, each with the right continuation first."""

SETTINGS = """
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""

LogLikelihoods = list[tuple[float, bool]]
"""Log-likelihoods of continuations, and whether each token of one is the argmax."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a task of local data."""
    directory = tmp_path_factory.mktemp("tasks")
    file = directory / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (directory / f"{TASK}.yaml").write_text(SETTINGS.format(task=TASK, file=file))
    return directory


def evaluate(clients: Clients, tasks: Path, model: str, arguments: str) -> LogLikelihoods:
    """Runs the task with a backend of `lm_eval`; returns what it found for each continuation."""
    out = clients.home / f"evaluation-{model}"
    clients.run(
        "lm_eval",
        f"--model={model}",
        f"--model_args={arguments}",
        f"--tasks={TASK}",
        f"--include_path={tasks}",
        f"--output_path={out}",
        "--log_samples",
        "--device=cpu",
    )
    [samples] = out.rglob("samples_*.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [
        (float(value), str(is_greedy) == "True")
        for line in lines
        for [[value, is_greedy]] in line["resps"]
    ]


def test_log_likelihoods_are_those_of_transformers(
    clients: Clients, one_stage: Stack, as_it_is: Path, tasks: Path
) -> None:
    arguments = f"model={MODEL},base_url={one_stage.http}/v1/completions,tokenizer={as_it_is}"
    ours = evaluate(
        clients, tasks, "local-completions", f"{arguments},num_concurrent=4,max_retries=1"
    )
    theirs = evaluate(clients, tasks, "hf", f"pretrained={as_it_is},dtype=float32")
    assert len(ours) == len(theirs) == sum(len(question["choices"]) for question in QUESTIONS)
    for (our_value, our_greedy), (their_value, their_greedy) in zip(ours, theirs, strict=True):
        assert our_value == pytest.approx(their_value, abs=TOLERANCE)
        assert our_greedy == their_greedy
