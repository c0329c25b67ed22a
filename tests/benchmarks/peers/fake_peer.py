"""`python -m tests.benchmarks.peers.fake_peer`: an adapter whose engine counts tokens only.

The n-th token of a request is its last prompt token plus n. A prompt that begins with `FATAL` ends
the process.
"""

import sys

from benchmarks.peers.protocol import Pipe, TokenIds, serve

FATAL = 666


class CountingEngine:
    """Gives every running request one token a step."""

    def __init__(self) -> None:
        self.versions = {"fake": "1"}
        self.settings = {"arguments": sys.argv[1:]}
        self.largest_batch = 0
        self._left: dict[int, list[int]] = {}

    def submit(self, index: int, prompt_token_ids: TokenIds, n_output: int) -> None:
        if prompt_token_ids[0] == FATAL:
            raise SystemExit(3)
        last = prompt_token_ids[-1]
        self._left[index] = list(range(last + 1, last + 1 + n_output))

    def step(self) -> dict[int, TokenIds]:
        self.largest_batch = max(self.largest_batch, len(self._left))
        news: dict[int, TokenIds] = {index: [left.pop(0)] for index, left in self._left.items()}
        self._left = {index: left for index, left in self._left.items() if left}
        return news


def main() -> None:
    pipe = Pipe()
    sys.stdout.write("engines print\n")
    serve(pipe, CountingEngine())


if __name__ == "__main__":
    main()
