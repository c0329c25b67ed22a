"""Prompts for `benchmarks.serving.speculation`: two kinds whose answers repeat the prompt, and one
whose answers do not."""

_TEXTS = (
    "The harbour of Lindholm was built in 1743 on the ruins of an older fishing village. For "
    "two hundred years its shipyards made wooden boats for the whole coast. In 1921 a fire "
    "destroyed the largest of them, and most of the carpenters moved away. Today the harbour is "
    "known for its small museum, which keeps nine restored boats and the tools with which they "
    "were made. About forty thousand people visit it every summer, and the town uses the money "
    "from the tickets to repair the old sea wall.",
    "Researchers at the University of Veldern have measured how fast the glacier above the town "
    "melts. Between 2005 and 2020 it lost a quarter of its ice. The water fills a lake behind a "
    "wall of loose stones, and the researchers fear that the wall may break. They propose to "
    "dig a channel of three hundred metres, which would lower the lake by eight metres. The "
    "town council will decide about the channel in spring, after engineers have looked at the "
    "cost.",
    "The new library of Port Amsel opened on Monday after six years of work. It has four "
    "floors, two hundred thousand books and a reading room with a glass roof. The building was "
    "planned for twelve million crowns and has cost nineteen. The mayor said that the library "
    "is worth its price, because it gives students a quiet place to work. Some citizens "
    "disagree: they would have liked the money to be spent on the schools, whose roofs leak "
    "when it rains.",
)

_CODES = (
    """def read_temperatures(path):
    values = []
    with open(path) as lines:
        for line in lines:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            station, value = line.split(",")
            values.append((station, float(value)))
    return values


def average_temperature(values):
    total = 0
    for station, value in values:
        total = total + value
    return total / len(values)
""",
    """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        self.history.append(("withdraw", amount))
""",
    """def count_words(text):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if word in counts:
            counts[word] = counts[word] + 1
        else:
            counts[word] = 1
    return counts


def most_common(counts, n):
    pairs = sorted(counts.items(), key=lambda pair: pair[1], reverse=True)
    return [word for word, count in pairs[:n]]
""",
)

_EDITS = (
    "Rename the variable `values` to `readings` in this code and give back the whole code:",
    "Add a docstring to each method of this class and give back the whole code:",
    "Rename the function `count_words` to `word_counts` and give back the whole code:",
)

_QUESTIONS = (
    "Write a short story about a clockmaker who cannot sleep.",
    "Explain to a child why the sky is blue and the sunset is red.",
    "What should I think of before I move to another city?",
)

KINDS = {
    "summaries": [
        f"Summarise the following text. Quote its most important sentences.\n\n{text}"
        for text in _TEXTS
    ],
    "code edits": [
        f"{edit}\n\n```python\n{code}```" for edit, code in zip(_EDITS, _CODES, strict=True)
    ],
    "questions": list(_QUESTIONS),
}
"""Prompts by kind of task."""
