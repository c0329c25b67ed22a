"""Prompts that are too long are refused as early as it can be known."""

import threading
from typing import Any

import pytest
import tokenizers

from services.common import errors
from services.frontend.request.conversation import ChatMessage, Conversation
from services.frontend.request.generation_request import (
    GenerationOptions,
    GenerationRequest,
    Prompt,
    n_characters,
)
from services.frontend.request.limits import ModelLimits
from services.frontend.request.memory_budget import MemoryBudget
from services.frontend.request.pipeline import ServedPipeline
from services.frontend.request.refusals import Refusal, Refusals
from services.frontend.request.text_pair import TextPair
from services.frontend.request.text_parts import TextParts
from services.frontend.request.texts_field import TextsField
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.prompt_encoder import INLINE_TURNS, PromptEncoder, TextLimits
from services.frontend.text.text_pieces import PIECE_CHARACTERS
from services.frontend.text.text_threads import TextThreads
from services.frontend.text.tokenizer import Tokenizer
from tests.frontend import checkpoints
from tests.frontend.conftest import soon

LIMITS = ModelLimits(ServedPipeline(model="m", vocab_size=512, max_model_len=128))
LONG = ModelLimits(ServedPipeline(model="m", vocab_size=512, max_model_len=100_000))


class Watched(Tokenizer):
    """Notes which texts are made into tokens, and where."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__(tokenizer)
        self.texts: list[str | TextPair] = []
        self.threads: list[threading.Thread] = []

    def to_tokens(self, text: str | TextPair, **options: Any) -> tuple[int, ...]:
        self.texts.append(text)
        self.threads.append(threading.current_thread())
        return super().to_tokens(text, **options)


class Encoder:
    """A prompt encoder, and what it counts."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer | None = None,
        *,
        template: str = checkpoints.CHAT_TEMPLATE,
        **limits: Any,
    ) -> None:
        self.tokenizer = Watched(tokenizer or checkpoints.byte_level())
        self.refusals = Refusals()
        self.budget = MemoryBudget(2**20, refusals=self.refusals)
        self.encoder = PromptEncoder(
            self.tokenizer,
            ChatTemplate(template),
            TextLimits(**limits),
            threads=TextThreads(self.refusals),
            refusals=self.refusals,
        )

    async def encode(
        self, prompt: Prompt, limits: ModelLimits = LIMITS, *, cut_to: int | None = None
    ) -> list[int]:
        with self.budget.share() as share:
            work = self.encoder.to_tokens(prompt, limits, share, cut_to=cut_to)
            return list(await soon(work))


def conversation(content: str, n_turns: int = 1) -> Conversation:
    return Conversation((ChatMessage("user", content),) * n_turns)


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (("x" * 101,), "prompt"),
        (("x" * 60, "x" * 60), "prompt"),
        ((conversation("x" * 100),), "messages"),
        ((conversation("", n_turns=50),), "messages"),
    ],
    ids=["one", "together", "conversation", "turns"],
)
def test_characters_are_limited_without_any_work(prompts: tuple[Prompt, ...], field: str) -> None:
    encoder = Encoder(max_characters=100)
    with pytest.raises(errors.InvalidRequest, match="more than 100 characters") as caught:
        encoder.encoder.check_length(GenerationRequest(prompts=prompts), None)
    assert caught.value.field == field
    assert encoder.refusals[Refusal.PROMPT_TOO_LONG] == 1
    encoder.encoder.check_length(GenerationRequest(prompts=("x" * 50, "x" * 50)), None)


def test_a_list_of_texts_is_named_when_all_together_are_too_long() -> None:
    encoder = Encoder(max_characters=100)
    options = GenerationOptions(wants_vector=True)
    cases: list[tuple[tuple[Prompt, ...], str]] = [
        (("x" * 60, "y" * 60), "input"),
        (("x", "y" * 101), "input[1]"),
        ((TextParts(("x" * 101, "y")),), "input[0]"),
    ]
    for prompts, field in cases:
        request = GenerationRequest(
            prompts=prompts, options=options, texts_field=TextsField("input")
        )
        with pytest.raises(errors.InvalidRequest, match="more than 100 characters") as caught:
            encoder.encoder.check_length(request, LIMITS)
        assert caught.value.field == field
        assert isinstance(caught.value, errors.ContextOverflow) == (field != "input")


async def test_of_a_long_text_that_is_cut_off_only_the_first_piece_becomes_tokens() -> None:
    encoder = Encoder(max_characters=2**20)
    text = "hello world, " * (PIECE_CHARACTERS // 12)
    short = await encoder.encode(text[:200], cut_to=20)
    assert len(short) == 20
    assert await encoder.encode(text, cut_to=20) == short
    pair = await encoder.encode(TextPair("hello", text), cut_to=20)
    assert pair == await encoder.encode(TextPair("hello", text[:200]), cut_to=20)
    assert all(
        len(each if isinstance(each, str) else each.text) < PIECE_CHARACTERS + 10
        for each in encoder.tokenizer.texts
    )
    blank = (
        " " * PIECE_CHARACTERS + "hello world, " * 60
    )  # of whose pieces the first has few tokens
    assert len(await encoder.encode(blank, LONG, cut_to=99_000)) > 100


@pytest.mark.parametrize("cut_to", [5, 900])
@pytest.mark.parametrize("is_pair", [False, True], ids=["text", "pair"])
async def test_a_long_text_is_cut_off_though_its_first_piece_has_too_few_tokens(
    cut_to: int, is_pair: bool
) -> None:
    encoder = Encoder(checkpoints.word_piece(), max_characters=2**21)
    text = " " * (PIECE_CHARACTERS + 10) + "the lazy dog " * 2_000 + " " * PIECE_CHARACTERS
    prompt = TextPair("the quick fox", text) if is_pair else text
    whole = encoder.tokenizer.to_tokens(prompt, cut_to=cut_to)
    assert len(whole) == cut_to
    encoder.tokenizer.texts.clear()
    assert await encoder.encode(prompt, LONG, cut_to=cut_to) == [*whole]
    (tokenized,) = encoder.tokenizer.texts
    assert n_characters(tokenized) <= 2 * PIECE_CHARACTERS + 13


async def test_text_that_must_have_too_many_tokens_is_not_made_into_tokens() -> None:
    encoder = Encoder()
    text = "x" * 20_000
    prompts: tuple[Prompt, ...] = (text, (5,) * 128)
    for prompt in prompts:
        with pytest.raises(errors.InvalidRequest, match="leaves no room"):
            encoder.encoder.check_length(GenerationRequest(prompts=(prompt,)), LIMITS)
    with pytest.raises(errors.InvalidRequest, match="at least"):
        await encoder.encode(text)
    with pytest.raises(errors.InvalidRequest, match="at least"):
        await encoder.encode(conversation(text))
    assert encoder.tokenizer.texts == []
    assert encoder.refusals[Refusal.PROMPT_TOO_LONG] == 4


async def test_tokens_are_counted_before_numbers_are_made_of_them() -> None:
    encoder = Encoder()
    with pytest.raises(errors.InvalidRequest, match="has 151 tokens"):
        await encoder.encode("x" * 150)
    assert len(await encoder.encode("x" * 126)) == 127


async def test_long_text_is_counted_while_it_is_made_into_tokens() -> None:
    encoder = Encoder()
    text = "hello " * 3_000
    with encoder.budget.share(2**20), pytest.raises(errors.PoolFull):
        await encoder.encode(text, LONG)
    assert encoder.tokenizer.texts == []
    assert len(await encoder.encode(text, LONG)) > 3_000
    assert encoder.budget.n_bytes == 0


async def test_template_that_was_slow_is_not_run_in_the_event_loop_again() -> None:
    slow = (
        "{% if messages[0]['content'] == 'slow' %}"
        "{% for i in range(20000) %}{{ messages | length }}{% endfor %}{% endif %}"
    )
    encoder = Encoder(template=slow, render_limit_s=0.01, max_characters=10**6)
    rendered_in: list[threading.Thread] = []
    template = encoder.encoder._chat_template
    assert template is not None
    render = template.render

    def watched(*args: Any, **options: Any) -> str:
        rendered_in.append(threading.current_thread())
        return render(*args, **options)

    template.render = watched  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(errors.InvalidRequest, match="takes longer") as caught:
            await encoder.encode(conversation("slow"))
        assert caught.value.field == "messages"
    loop = threading.main_thread()
    assert [thread is loop for thread in rendered_in] == [True, False, False]
    assert encoder.refusals[Refusal.PROMPT_TOO_LONG] == 2


async def test_long_conversation_is_not_written_down_in_the_event_loop() -> None:
    encoder = Encoder()
    with encoder.budget.share(2**20), pytest.raises(errors.PoolFull):
        await encoder.encode(conversation("", n_turns=INLINE_TURNS + 1), LONG)
    assert await encoder.encode(conversation("", n_turns=INLINE_TURNS + 1), LONG)


async def test_far_too_long_text_is_not_made_into_tokens_as_a_whole() -> None:
    encoder = Encoder(max_characters=2**21)
    text = "🐋" * PIECE_CHARACTERS + "x" * 10
    with pytest.raises(errors.ContextOverflow) as caught:
        await encoder.encode(text, LONG)
    assert caught.value.n_prompt > LONG.pipeline.max_model_len
    assert encoder.tokenizer.texts == []
    assert encoder.refusals[Refusal.PROMPT_TOO_LONG] == 1


@pytest.mark.parametrize(
    "prompt",
    ["", "x" * 20_000, "hello " * 60_000, (5,) * 1000, conversation("x" * 1000)],
    ids=["empty", "long", "pieces", "tokens", "conversation"],
)
async def test_any_prompt_is_counted(prompt: Prompt) -> None:
    encoder = Encoder(max_characters=2**21)
    with encoder.budget.share() as share:
        counted = await soon(encoder.encoder.count(prompt, LIMITS, share))
    unlimited = ModelLimits(ServedPipeline(model="m", vocab_size=512, max_model_len=10**7))
    expected = len(await encoder.encode(prompt, unlimited))
    assert 0 <= expected - counted <= 1  # special tokens of a text in pieces are not counted
    assert counted == expected or n_characters(prompt) > PIECE_CHARACTERS
