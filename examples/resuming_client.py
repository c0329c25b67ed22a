"""Streams a completion. When its frontend is lost, the stream goes on through another frontend.

python examples/resuming_client.py [--chat] [--prompt=TEXT] [--max-tokens=N] [base URL]...

The package `orcinus_client` (clients/python) keeps the state that is needed to resume the stream.
"""

import argparse
import sys
from typing import Any

from orcinus_client import Client


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base_urls", nargs="*", default=["http://127.0.0.1:8000/v1"])
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"max_tokens": arguments.max_tokens, "seed": arguments.seed}
    with Client(*arguments.base_urls) as client:
        if arguments.chat:
            messages = [{"role": "user", "content": arguments.prompt}]
            chunks = client.stream_chat(messages, **options)
        else:
            chunks = client.stream_completion(arguments.prompt, **options)
        for chunk in chunks:
            for choice in chunk["choices"]:
                print(choice.get("text") or choice.get("delta", {}).get("content") or "", end="")
            sys.stdout.flush()
    print()


if __name__ == "__main__":
    main()
