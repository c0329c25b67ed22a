"""Talks to Orcinus over gRPC: describes the model, gets a whole answer, and streams an answer that
goes on through the next frontend when its frontend is lost.

PYTHONPATH=protos/gen python examples/grpc_client.py [host:port]...

The package `orcinus_client` (clients/python) has the same as `generate_stream`.
"""

import sys
import time
from collections.abc import Iterator, Sequence

import grpc
from orcinus.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

TIMEOUT_S = 60
"""Seconds after which a request is cancelled, here and on the server."""

OPTIONS = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 60_000))
"""Makes a channel notice that a frontend's host is silent, within 90 seconds."""

MAY_GO_ON = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED}
MAX_FAILURES = 12


def main(addresses: Sequence[str]) -> None:
    channels = [grpc.insecure_channel(address, options=OPTIONS) for address in addresses]
    services = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]

    model = services[0].DescribeModel(inference_pb2.DescribeModelRequest(), timeout=TIMEOUT_S)
    print(f"{addresses[0]} serves {model.model} on {model.n_stages} stages\n")

    prompt = inference_pb2.Prompt(text="Once upon a time")
    sampling = sampling_pb2.SamplingParams(temperature=0.8, seed=1)
    options = inference_pb2.GenerationOptions(max_tokens=32, sampling=sampling)

    answer = services[0].Generate(
        inference_pb2.GenerateRequest(prompt=prompt, options=options), timeout=TIMEOUT_S
    )
    print(f"{prompt.text}{answer.choices[0].text}\n")

    print(prompt.text, end="")
    request = inference_pb2.GenerateStreamRequest(prompt=prompt, options=options)
    for piece in streamed(services, request):
        print(piece.choice.text, end="", flush=True)
    print(f"\n\n{piece.usage.completion_tokens} tokens")
    for channel in channels:
        channel.close()


def streamed(
    services: Sequence[inference_pb2_grpc.InferenceServiceStub],
    request: inference_pb2.GenerateStreamRequest,
) -> Iterator[inference_pb2.GenerateStreamResponse]:
    """Yields the pieces of one answer. After a break the same request is sent again, with what has
    come so far, and the new stream begins after that."""
    request.options.return_token_ids = True
    n_failures = 0
    while True:
        service = services[n_failures % len(services)]
        try:
            for piece in service.GenerateStream(request, timeout=TIMEOUT_S):
                note(piece, request.resumption)
                yield piece
            return
        except grpc.RpcError as error:
            n_failures += 1
            if error.code() not in MAY_GO_ON or n_failures == MAX_FAILURES:
                raise
            time.sleep(min(5.0, 0.1 * 2**n_failures))


def note(piece: inference_pb2.GenerateStreamResponse, so_far: inference_pb2.Resumption) -> None:
    """Keeps what is needed to resume the stream. A request for several answers has one entry of
    `answers` for each, by `piece.choice.index`."""
    so_far.request_id = piece.request_id
    if piece.HasField("seed"):  # in the first message alone
        so_far.seed = piece.seed
    if not so_far.answers:
        so_far.answers.add()
    so_far.answers[0].token_ids.extend(piece.choice.token_ids)
    if piece.choice.finish_reason:
        so_far.answers[0].is_finished = True


if __name__ == "__main__":
    main(sys.argv[1:] or ["127.0.0.1:50051"])
