"""Talks to Orcinus with the official `openai` package: a completion, a chat, a stream.

python examples/openai_client.py [base URL]
"""

import sys

import openai


def main(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key="unused") as client:
        model = client.models.list().data[0].id
        print(f"{base_url} serves {model}\n")

        completion = client.completions.create(
            model=model, prompt="Once upon a time", max_tokens=32, temperature=0.8, seed=1
        )
        print(f"Once upon a time{completion.choices[0].text}\n")

        # Options that OpenAI does not have go into `extra_body`.
        chunks = client.completions.create(
            model=model,
            prompt="One day, a little whale",
            max_tokens=32,
            stream=True,
            extra_body={"top_k": 20, "min_tokens": 8},
        )
        print("One day, a little whale", end="")
        for chunk in chunks:
            print(chunk.choices[0].text, end="", flush=True)
        print("\n")

        try:
            chat = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=32
            )
        except openai.BadRequestError as error:
            print(f"chat: {error.message}")  # not every model has a chat template
        else:
            print(f"chat: {chat.choices[0].message.content} {chat.usage}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1")
