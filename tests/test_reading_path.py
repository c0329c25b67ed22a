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
        "if reservation is None: break",
    ),
    (
        "Why does no admitted request ever wait for memory?",
        "memory/kv_manager.py",
        "if n_new > n_left: return None self.n_reserved_blocks += n_new",
    ),
    (
        "What limits the batches in flight?",
        "core/scheduler.py",
        "if len(self._in_flight) == self.pipeline_depth: return None",
    ),
    (
        "Can a request be in two batches in flight?",
        "core/request.py",
        "n_coming = self.n_tokens + self.n_awaited return n_coming <",
    ),
    (
        "What becomes of the tokens of a request that has ended in an earlier batch?",
        "core/scheduler.py",
        "if request.state is _FINISHED: self._release_if_unused(request) return None",
    ),
    (
        "How often are the options of a request sent to the ranks?",
        "pipeline/plan.py",
        "compress(zip(rows, batch.spans, strict=True), columns.is_admission)",
    ),
    (
        "How does a later stage know what comes before the activations arrive?",
        "controller/plan_relay.py",
        "await self._next.write(plan)",
    ),
    (
        "How are requests of different lengths computed in one batch?",
        "engine/input_batch.py",
        "first_tokens, span_of_token, positions = _places(starts, widths)",
    ),
    (
        "Which layers does a stage compute?",
        "models/stage.py",
        "size, n_larger = divmod(n_layers, n_stages)",
    ),
    (
        "What becomes of requests when the scheduler is lost?",
        "link/scheduler_client.py",
        "self._stream.send(request.message())",
    ),
]
"""Questions of a reader who knows only the paper, and the code that answers them."""


@pytest.mark.parametrize(
    ("question", "name", "answer"), QUESTIONS, ids=[name for _, name, _ in QUESTIONS]
)
def test_the_files_answer_a_question(question: str, name: str, answer: str) -> None:
    assert answer in text_of(name), question
