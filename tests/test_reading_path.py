"""The files on the reading path exist, are short enough, and answer questions about the system."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reading-path.md"
MAX_LINES = 3_000
"""Lines of all files together: an hour's reading."""


def listed() -> list[Path]:
    """Returns the files on the reading path, in order."""
    links = re.findall(r"^\d+\. \[`[^`]+`\]\(\.\./([^)]+)\)", PAGE.read_text("utf-8"), flags=re.M)
    return [ROOT / link for link in links]


def text_of(name: str) -> str:
    """Returns the text of the file on the path whose address ends with a name, with single
    spaces."""
    [path] = [path for path in listed() if path.as_posix().endswith(name)]
    return " ".join(path.read_text("utf-8").split())


def test_the_path_has_fifteen_files_or_so_each_once() -> None:
    files = listed()
    assert all(path.is_file() for path in files)
    assert len(set(files)) == len(files)
    assert 12 <= len(files) <= 18


def test_the_path_is_read_in_an_hour() -> None:
    assert sum(len(path.read_text("utf-8").splitlines()) for path in listed()) <= MAX_LINES


def test_the_numbers_of_the_list_count_its_files() -> None:
    numbers = re.findall(r"^(\d+)\. \[", PAGE.read_text("utf-8"), flags=re.M)
    assert numbers == [str(number) for number in range(1, len(listed()) + 1)]


@pytest.mark.parametrize("name", ["scheduler.py", "request_pool.py", "kv_manager.py"])
def test_what_is_optional_is_never_tested_for(name: str) -> None:
    """Objects that do nothing stand in for features that are off."""
    text = text_of(f"core/{'memory/' if name == 'kv_manager.py' else ''}{name}")
    assert re.findall(r"self\._?[\w.]+ is (?:not )?None", text) == []


QUESTIONS = [
    (
        "When is a waiting request admitted, and may a smaller one behind it overtake it?",
        "policies/orca.py",
        "The first that does not fit ends the selection (`break`, not `continue`): a later, "
        "smaller one must not overtake it.",
    ),
    (
        "Why does no admitted request ever wait for memory?",
        "memory/kv_manager.py",
        "A request reserves, once, all the slots it can need in its life, so that no admitted "
        "request ever waits for memory",
    ),
    (
        "Which lines of Algorithm 1 are where, and what limits the batches in flight?",
        "core/scheduler.py",
        "if len(self._in_flight) == self.pipeline_depth: return None",
    ),
    (
        "Can a request be in two batches in flight?",
        "core/scheduler.py",
        "with `token_hand_off`, a request rides the next iteration before the last one has "
        "returned.",
    ),
    (
        "What becomes of a request that ends while a later batch still computes it?",
        "core/scheduler.py",
        "what later batches bring is thrown away, and its memory is free when the last of them "
        "has returned.",
    ),
    (
        "What does the control message of a decode contain, and how often are its options sent?",
        "pipeline/plan.py",
        "A request is announced once, with its admission, and is a row of the ranks' tables from "
        "then on; tokens and blocks are sent once.",
    ),
    (
        "How does a later stage know what comes before the activations arrive?",
        "controller/plan_relay.py",
        "The next stage is sent each at once, so it knows what will come before the activations "
        "do (Orca, section 4.1).",
    ),
    (
        "How are requests of different lengths computed in one batch?",
        "engine/input_batch.py",
        "A token is a token, whichever request it belongs to (selective batching, OSDI'22 "
        "section 3.2). What attention and sampling must know beside it is prepared here",
    ),
    (
        "Which layers does a stage compute, and which stage embeds and which one samples?",
        "models/stage.py",
        "The first stage also embeds tokens, the last one also turns hidden states into logits.",
    ),
    (
        "What becomes of requests when a stage, or the scheduler, is lost?",
        "link/scheduler_client.py",
        "a request is submitted to the next scheduler with the tokens it has",
    ),
]
"""Questions of a reader who knows only the paper, and the words that answer them."""


@pytest.mark.parametrize(
    ("question", "name", "answer"), QUESTIONS, ids=[name for _, name, _ in QUESTIONS]
)
def test_the_files_answer_a_question(question: str, name: str, answer: str) -> None:
    assert answer in text_of(name), question
