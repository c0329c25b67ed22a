"""A chat keeps what was said, and no more; Ctrl-C ends an answer and not the chat."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from services.cli.chat import ChatSession
from services.cli.target import Target
from services.common.http_api import ApiError, HttpApi
from tests.cli.fake_api import HOLD, FakeApi, delta
from tests.limits import HANG_S


def conversation(api: FakeApi, **options: Any) -> ChatSession:
    return ChatSession(
        Target(HttpApi(api.url, timeout_s=HANG_S), "fake", None), system="Be brief.", **options
    )


def said(talk: ChatSession, text: str) -> str:
    return "".join(piece.text for piece in talk.say(text) if not piece.is_reasoning)


def test_each_turn_is_sent_with_those_before() -> None:
    with FakeApi(lambda body: [delta("an"), delta(" answer")]).serving() as api:
        talk = conversation(api, options={"max_tokens": 5})
        assert said(talk, "one") == "an answer"
        assert said(talk, "two") == "an answer"
        talk.reset()
        assert said(talk, "three") == "an answer"
    contents = [[message["content"] for message in body["messages"]] for body in api.bodies]
    assert contents == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "an answer", "two"],
        ["Be brief.", "three"],
    ]
    assert all(body["stream"] and body["max_tokens"] == 5 for body in api.bodies)


def test_reasoning_is_shown_and_not_sent_back() -> None:
    thinking = delta("", reasoning_content="hm")
    with FakeApi(lambda body: [thinking, delta("yes")]).serving() as api:
        talk = conversation(api, options={})
        pieces = list(talk.say("really?"))
    assert [(piece.text, piece.is_reasoning) for piece in pieces] == [("hm", True), ("yes", False)]
    assert talk.messages[-1] == {"role": "assistant", "content": "yes"}


def test_an_answer_that_is_not_read_to_its_end_stays_as_far_as_it_was() -> None:
    with FakeApi(lambda body: [delta("begin"), HOLD]).serving() as api:
        talk = conversation(api, options={})
        pieces = talk.say("one")
        assert next(pieces).text == "begin"
        pieces.close()
    assert [message["content"] for message in talk.messages] == ["Be brief.", "one", "begin"]


@pytest.mark.parametrize(
    "answer", [(400, "too long"), [{"error": {"message": "too long"}}]], ids=["refused", "midway"]
)
def test_what_was_refused_was_not_said(answer: Any) -> None:
    with FakeApi(lambda body: answer).serving() as api:
        talk = conversation(api, options={})
        with pytest.raises(ApiError, match="too long"):
            list(talk.say("one"))
    assert [message["content"] for message in talk.messages] == ["Be brief."]


def chat(api: FakeApi, *arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    """Runs the command with lines on standard input."""
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "chat", "--url", api.url, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, "KEY": "secret"},
    )


def test_lines_are_answered_and_commands_obeyed() -> None:
    with FakeApi(lambda body: [delta(body["messages"][-1]["content"].upper())]).serving() as api:
        lines = "hello\n\n/reset\n/nothing\nyou\n/quit\nnever\n"
        done = chat(api, "--key-env", "KEY", text=lines)
    assert done.returncode == 0
    assert done.stdout == "HELLO\nThe conversation is forgotten.\nYOU\n"
    assert done.stderr == "error: there is no command /nothing; /help lists them\n"
    assert api.keys == ["Bearer secret"]
    assert [len(body["messages"]) for body in api.bodies] == [1, 1]


@pytest.mark.thorough
def test_a_refusal_is_told_and_the_chat_goes_on() -> None:
    answers = iter([(400, "has no chat template"), [delta("now")]])
    with FakeApi(lambda body: next(answers)).serving() as api:
        done = chat(api, text="one\ntwo\n")
    assert (done.returncode, done.stdout) == (0, "\nnow\n")
    assert done.stderr == "error: has no chat template\n"


@pytest.mark.thorough
def test_nobody_there_is_said() -> None:
    done = chat(FakeApi(lambda body: [], url="http://127.0.0.1:1"), text="")
    assert done.returncode == 1
    assert done.stderr.startswith("error: http://127.0.0.1:1 cannot be reached: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--url", "http://x"],
        *(
            pytest.param(arguments, marks=pytest.mark.thorough)
            for arguments in (["--frob"], ["--key-env", "NOBODY_SETS_THIS"])
        ),
    ],
)
@pytest.mark.thorough
def test_options_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "chat", *arguments],
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 2


def read_until(terminal: int, text: str, deadline: float) -> str:
    """What a terminal shows, up to a text."""
    shown = ""
    while text not in shown:
        left = deadline - time.monotonic()
        assert left > 0, shown
        if select.select([terminal], [], [], left)[0]:
            try:
                shown += os.read(terminal, 4096).decode(errors="replace")
            except OSError as error:  # Linux: no process has the other end open any more
                raise AssertionError(f"the process has ended; it showed {shown!r}") from error
    return shown


def ignore_interrupts() -> None:
    """Does as a shell does for what it starts in the background, which inherits it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def test_ctrl_c_ends_an_answer_and_not_the_chat() -> None:
    first = iter([[delta("begin"), HOLD]])
    answers = lambda body: next(first, [delta("again")])  # noqa: E731
    deadline = time.monotonic() + HANG_S
    ours, theirs = pty.openpty()
    with FakeApi(answers).serving() as api:
        chatting = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "chat", "--url", api.url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=ignore_interrupts,
        )
        os.close(theirs)
        try:
            read_until(ours, "> ", deadline)
            os.write(ours, b"one\r")
            read_until(ours, "begin", deadline)
            assert api.is_holding.wait(HANG_S)
            chatting.send_signal(signal.SIGINT)
            read_until(ours, "> ", deadline)
            os.write(ours, b"two\r")
            read_until(ours, "again", deadline)
            os.write(ours, b"/quit\r")
            assert chatting.wait(HANG_S) == 0
        finally:
            chatting.kill()
            chatting.wait()
    os.close(ours)
    messages = [[message["content"] for message in body["messages"]] for body in api.bodies]
    assert messages == [["one"], ["one", "begin", "two"]]
