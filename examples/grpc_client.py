"""Talks to Orcinus over gRPC: describes the model, gets a whole answer, and streams an answer.

PYTHONPATH=protos/gen python examples/grpc_client.py [host:port]
"""

import sys

import grpc
from orcinus.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

TIMEOUT_S = 60
"""Seconds after which a request is cancelled, here and on the server."""


def main(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        service = inference_pb2_grpc.InferenceServiceStub(channel)

        model = service.DescribeModel(inference_pb2.DescribeModelRequest(), timeout=TIMEOUT_S)
        print(f"{address} serves {model.model} on {model.n_stages} stages\n")

        prompt = inference_pb2.Prompt(text="Once upon a time")
        sampling = sampling_pb2.SamplingParams(temperature=0.8, seed=1)
        options = inference_pb2.GenerationOptions(max_tokens=32, sampling=sampling)

        answer = service.Generate(
            inference_pb2.GenerateRequest(prompt=prompt, options=options), timeout=TIMEOUT_S
        )
        print(f"{prompt.text}{answer.choices[0].text}\n")

        print(prompt.text, end="")
        for piece in service.GenerateStream(
            inference_pb2.GenerateStreamRequest(prompt=prompt, options=options), timeout=TIMEOUT_S
        ):
            print(piece.choice.text, end="", flush=True)
        print(f"\n\n{piece.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
