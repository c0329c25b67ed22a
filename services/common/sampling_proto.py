"""Converts `SamplingParams` to and from the message in `sampling.proto`, field by field, by name.

The conversion is separate from the definition of `SamplingParams`, because the engine does not
import protobuf.
"""

from operator import attrgetter

from orcinus.v1 import sampling_pb2

from services.common.sampling import (
    OPTIONS,
    SamplingParams,
    TokenBiases,
    TokenLists,
    TokenSequences,
)

_LISTS = tuple(name for name, option in OPTIONS.items() if isinstance(option.allowed, TokenLists))
_BIASES = tuple(name for name, option in OPTIONS.items() if isinstance(option.allowed, TokenBiases))
_SEQUENCES = tuple(
    name for name, option in OPTIONS.items() if isinstance(option.allowed, TokenSequences)
)
_values_of = attrgetter(*OPTIONS)
_NUMBERS = tuple(name for name in OPTIONS if name not in (*_LISTS, *_BIASES, *_SEQUENCES))


def to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Returns the message with all options of `params`. Every field of the message is set."""
    fields = dict(zip(OPTIONS, _values_of(params), strict=True))
    for name in _BIASES:
        fields[name] = dict(fields[name])
    for name in _SEQUENCES:
        fields[name] = [sampling_pb2.TokenSequence(token_ids=one) for one in fields[name]]
    return sampling_pb2.SamplingParams(**fields)


def from_proto(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Returns the options of a message. Fields that are not set have their defaults.

    The options are not checked here. Frontends and schedulers check them, and ranks receive only
    options that a scheduler has checked.
    """
    given = {name: getattr(message, name) for name in _NUMBERS if message.HasField(name)}
    given |= {name: tuple(getattr(message, name)) for name in _LISTS}
    given |= {name: tuple(sorted(getattr(message, name).items())) for name in _BIASES}
    given |= {
        name: tuple(tuple(one.token_ids) for one in getattr(message, name)) for name in _SEQUENCES
    }
    return SamplingParams(**given)
