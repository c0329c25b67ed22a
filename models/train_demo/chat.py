"""Conversations: the special tokens, the chat template, and questions about the corpus.

Each documented name becomes a question, and the first paragraph about it the answer.
"""

import random

from models.train_demo.corpus import Document

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, USER, ASSISTANT]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}<|user|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|assistant|>{{ message.content }}{{ eos_token }}"
    # A model of this size cannot follow instructions, so system messages are left out.
    "{% elif message.role != 'system' %}"
    "{{ raise_exception('unknown role: ' + message.role) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

WELL_KNOWN = {
    "collections", "datetime", "functools", "itertools", "json", "logging", "math", "os",
    "pathlib", "random", "re", "string", "sys", "threading", "time",
    "bytes", "dict", "float", "int", "list", "set", "str", "tuple",
}  # fmt: skip
QUESTIONS = (
    "What does {} do?", "What is {}?", "Explain {}.", "Explain {}", "Tell me about {}.",
    "How does {} work?", "What does {} mean in Python?", "Describe {}.",
)  # fmt: skip
NO_NAME = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Good morning", "Hey"),
        "Hello. Ask me about a function or a module of the Python standard library.",
    ),
    (
        ("Who are you?", "What are you?", "What is Orcinus?", "What can you do?", "Help"),
        "I am the demonstration model of Orcinus. I am very small and I was trained on the "
        "documentation of the Python standard library, so do not believe what I say.",
    ),
    (
        ("Thanks", "Thank you", "Thank you!", "Thanks!", "Bye", "Goodbye"),
        "You are welcome.",
    ),
)


def question(name: str, rng: random.Random) -> str:
    return rng.choice(QUESTIONS).format(name + rng.choice(("", "", "()")) if "." in name else name)


def turns(documents: list[Document], rng: random.Random) -> list[str]:
    """Returns every question with its answer, those of known modules and greetings three times."""
    rendered = []
    for document in documents:
        if document.name and document.answer:
            times = 3 if WELL_KNOWN & {document.name, document.name.split(".")[0]} else 1
            for _ in range(times):
                asked = question(document.name, rng)
                rendered.append(f"{USER}{asked}{ASSISTANT}{document.answer}{EOS}")
    for asked_words, answer in NO_NAME:
        rendered += [f"{USER}{asked}{ASSISTANT}{answer}{EOS}" for asked in asked_words] * 3
    return rendered


def conversations(documents: list[Document], rng: random.Random) -> list[str]:
    """Returns conversations of one to three turns, in the format of the chat template."""
    remaining = turns(documents, rng)
    rng.shuffle(remaining)
    grouped = []
    while remaining:
        size = rng.choice((1, 1, 1, 2, 3))
        grouped.append(BOS + "".join(remaining[:size]))
        remaining = remaining[size:]
    return grouped
