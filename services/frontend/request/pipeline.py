"""A frontend's description of the pipeline that serves a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from orcinus.v1 import scheduler_pb2

from services.common.adapters import adapters_in, max_loaded_in
from services.common.pooling import Pooling, pooling_in

Traits = tuple[tuple[str, str], ...]
"""Type of the traits of workers: names and values that say what the workers compute with, such as
digests of the weights, sorted by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPipeline:
    """Describes a pipeline: the model, the limits of the model, and the numbers of stages and
    ranks."""

    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    n_stages: int = 1
    tp_size: int = 1
    can_follow_grammars: bool = False
    traits: Traits = field(default=(), repr=False)
    """Traits of the pipeline's workers. Another pipeline of the model may have other workers."""

    loaded: Traits = field(default=(), repr=False)
    """Names and digests of the adapters that clients have loaded, sorted by name."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """Maps the name of each adapter that requests may use to the digest of the adapter.
        Adapters that the workers have from the start come before adapters that clients have
        loaded."""
        fixed = adapters_in(dict(self.traits))
        loaded = self.loaded if self.loads_adapters else ()
        return fixed | {name: digest for name, digest in loaded if name not in fixed}

    @property
    def loads_adapters(self) -> bool:
        """Whether the workers load adapters while they run."""
        return max_loaded_in(dict(self.traits)) > 0

    @property
    def pooling(self) -> Pooling | None:
        """How the workers make vectors (embeddings or scores); None if they make none."""
        return pooling_in(dict(self.traits))

    @classmethod
    def from_proto(cls, message: scheduler_pb2.PipelineDescription) -> "ServedPipeline":
        """Returns the pipeline that a message of the scheduler describes."""
        return cls(
            model=message.model,
            vocab_size=message.vocab_size,
            max_model_len=message.max_model_len,
            eos_token_ids=tuple(message.eos_token_ids),
            n_stages=message.n_stages,
            tp_size=message.tp_size,
            can_follow_grammars=message.can_follow_grammars,
            traits=tuple(sorted(message.traits.items())),
        )
