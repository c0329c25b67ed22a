"""Fuzzing target: messages of clients, rendered by chat templates of several kinds."""

from services.common import errors
from services.frontend.request.conversation import ChatMessage, Conversation, EarlierCall
from services.frontend.text.chat_template import ChatTemplate
from tests.fuzz.coverage.target import Choices, Target, any_bytes

TEMPLATES = [
    ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    for source in (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}{{ m['content'] }}"
        "{{ eos_token }}{% endif %}{% endfor %}",
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.s = ns.s + m.content %}{% endif %}{% endfor %}{{ ns.s }}"
        "{% for m in messages %}{{ m.name or m.role }}: {{ m.content.split('</think>')[-1] }}\n"
        "{{ m | tojson }}{{ m.content | int + 1 }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}{{ strftime_now('%Y') }}",
    )
]  # fmt: skip


def run(data: bytes) -> None:
    """Renders a conversation."""
    choices = Choices(data)
    template = choices.one_of(TEMPLATES)
    messages: list[ChatMessage] = []
    while not choices.is_over and len(messages) < 64:
        role = choices.one_of(["user", "assistant", "system", "tool", None])
        name = choices.one_of([None, "bob", ""])
        calls = choices.one_of([(), (), (EarlierCall("1", "find", choices.text()),)])
        messages.append(ChatMessage(role or choices.text(), choices.text(), name, calls))
    try:
        text = template.render(Conversation(tuple(messages)), limit_s=0.5, max_characters=100_000)
        assert len(text) <= 100_000
    except errors.InvalidRequest as error:
        str(error).encode(errors="surrogateescape")


TARGET = Target(
    run=run,
    seeds=[
        *any_bytes(),
        *(bytes([kind, 0, 0, 5]) + b"hello" + bytes([1, 1, 3]) + b"you" for kind in range(3)),
    ],
    words=["</think>", "{{", "9" * 20, "<s>"],
    max_bytes=1024,
)
