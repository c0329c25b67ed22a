"""What inputs are made of: they are messages, or nearly, and get far and wide."""

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from orcinus.v1 import inference_pb2, scheduler_pb2

from tests.fuzz.choices import N_BYTES, Choices
from tests.fuzz.hints import INFERENCE
from tests.fuzz.messages import message, wire

DESCRIPTOR = inference_pb2.DESCRIPTOR.message_types_by_name["GenerateStreamRequest"]
CONNECT = scheduler_pb2.DESCRIPTOR.message_types_by_name["ConnectRequest"]


@given(st.binary(max_size=N_BYTES))
def test_the_same_bytes_make_the_same_message(data: bytes) -> None:
    made = [message(Choices(data), DESCRIPTOR, INFERENCE) for _ in range(2)]
    assert made[0].SerializeToString() == made[1].SerializeToString()


def test_no_bytes_make_the_simplest_message() -> None:
    assert not message(Choices(b""), CONNECT, {}).ByteSize()


def test_every_field_is_set_sometimes_and_some_bytes_are_no_message() -> None:
    fields, n_broken = set(), 0
    for number in range(1200):
        choices = Choices(number.to_bytes(2) * 3 + bytes((number * i) % 251 for i in range(200)))
        data = wire(choices, DESCRIPTOR, INFERENCE)
        try:
            made = inference_pb2.GenerateStreamRequest.FromString(data)
        except DecodeError:
            n_broken += 1
        else:
            fields |= {field.name for field, _ in made.ListFields()}
            fields |= {field.name for field, _ in made.options.sampling.ListFields()}
    assert fields >= {f.name for f in DESCRIPTOR.fields} | {"temperature", "seed", "top_k"}
    assert n_broken > 3
