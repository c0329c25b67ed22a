"""Lists the model families, and builds one rank's share of a stage for any family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from kernels import ops_for
from kernels.packing.linear import can_compute
from kernels.weights.linear import Activations, Quantization
from services.common.pooling import Pooling
from services.worker.models.adapters.adaptable_program import ModulePlaces
from services.worker.models.adapters.adapted_tensors import AdaptedTensors
from services.worker.models.adapters.adapter import Adapter
from services.worker.models.checkpoint_tensors import CheckpointTensors
from services.worker.models.config import ModelConfig, UnsupportedModel
from services.worker.models.decoder import DecoderStage
from services.worker.models.families.bert import BertStage
from services.worker.models.families.cohere import CohereStage
from services.worker.models.families.cohere2 import Cohere2Stage
from services.worker.models.families.deepseek_v2 import DeepseekV2Stage
from services.worker.models.families.deepseek_v3 import DeepseekV3Stage
from services.worker.models.families.ernie4_5 import Ernie4_5Stage
from services.worker.models.families.exaone4 import Exaone4Stage
from services.worker.models.families.gemma import Gemma1Stage
from services.worker.models.families.gemma2 import Gemma2Stage
from services.worker.models.families.gemma3 import Gemma3Stage
from services.worker.models.families.gemma3n import Gemma3nStage
from services.worker.models.families.gemma4 import Gemma4Stage, Gemma4UnifiedStage
from services.worker.models.families.glm import GlmStage
from services.worker.models.families.glm4 import Glm4Stage
from services.worker.models.families.glm4_moe_lite import Glm4MoeLiteStage
from services.worker.models.families.gpt2 import GPT2Stage
from services.worker.models.families.gpt_oss import GptOssStage
from services.worker.models.families.granite import GraniteStage
from services.worker.models.families.llama import LlamaStage
from services.worker.models.families.ministral import MinistralStage
from services.worker.models.families.ministral3 import Ministral3Stage
from services.worker.models.families.mistral import MistralStage
from services.worker.models.families.mixtral import MixtralStage
from services.worker.models.families.olmo2 import Olmo2Stage
from services.worker.models.families.olmo3 import Olmo3Stage
from services.worker.models.families.olmoe import OlmoeStage
from services.worker.models.families.opt import OPTStage
from services.worker.models.families.phi3 import Phi3Stage
from services.worker.models.families.qwen2 import Qwen2Stage
from services.worker.models.families.qwen2_moe import Qwen2MoeStage
from services.worker.models.families.qwen3 import Qwen3Stage
from services.worker.models.families.qwen3_5 import Qwen35Stage
from services.worker.models.families.qwen3_5_moe import Qwen35MoeStage
from services.worker.models.families.qwen3_moe import Qwen3MoeStage
from services.worker.models.families.qwen3_next import Qwen3NextStage
from services.worker.models.families.roberta import (
    CamembertStage,
    RobertaStage,
    XLMRobertaStage,
)
from services.worker.models.families.seed_oss import SeedOssStage
from services.worker.models.families.smollm3 import SmolLM3Stage
from services.worker.models.families.starcoder2 import Starcoder2Stage
from services.worker.models.random_tensors import RandomTensors
from services.worker.models.stage import StageModel
from services.worker.models.stage_place import StagePlace, layer_range
from services.worker.models.tensor_files import TensorFiles
from services.worker.models.tensor_parallel import check_rank
from services.worker.models.weight_cache import CachedShare
from services.worker.models.weights import OnProgress, TensorSource, WantedTensors


class Family(Protocol):
    """The type of a family's class, which is a subclass of DecoderStage. Calling it builds a
    stage."""

    @property
    def config_type(self) -> type[ModelConfig]: ...

    @property
    def embedding_name(self) -> str: ...

    @property
    def head_name(self) -> str: ...

    @property
    def layers_name(self) -> str: ...

    def __call__(
        self,
        config: Any,  # of config_type
        place: StagePlace,
        *,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> DecoderStage: ...


_FAMILIES: tuple[Family, ...] = (
    BertStage,
    CamembertStage,
    Cohere2Stage,
    CohereStage,
    DeepseekV2Stage,
    DeepseekV3Stage,
    Ernie4_5Stage,
    Exaone4Stage,
    Gemma1Stage,
    Gemma2Stage,
    Gemma3Stage,
    Gemma3nStage,
    Gemma4Stage,
    Gemma4UnifiedStage,
    Glm4MoeLiteStage,
    Glm4Stage,
    GlmStage,
    GPT2Stage,
    GptOssStage,
    GraniteStage,
    LlamaStage,
    Ministral3Stage,
    MinistralStage,
    MistralStage,
    MixtralStage,
    Olmo2Stage,
    Olmo3Stage,
    OlmoeStage,
    OPTStage,
    Phi3Stage,
    Qwen2MoeStage,
    Qwen2Stage,
    Qwen35MoeStage,
    Qwen35Stage,
    Qwen3MoeStage,
    Qwen3NextStage,
    Qwen3Stage,
    RobertaStage,
    SeedOssStage,
    SmolLM3Stage,
    Starcoder2Stage,
    XLMRobertaStage,
)

FAMILIES = {family.config_type.architecture: family for family in _FAMILIES}


def build_stage(
    config: ModelConfig,
    files: TensorFiles | None,
    *,
    stage_index: int,
    n_stages: int,
    tp_rank: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress,
    quantization: Quantization,
    activations: Activations,
    cached: CachedShare | None = None,
    adapters: Sequence[Adapter] = (),
    takes_adapters: bool = False,
    pooling: Pooling | None = None,
) -> StageModel:
    """Returns one rank's share of one stage, on `device`.

    The tensors are read from `files`, or are random if `files` is None. `quantization` applies to
    the matrices of linear layers, embeddings and heads, but not to experts and routers.
    `activations` says whether products with quantised matrices may round their inputs.
    `on_progress` is called with the bytes read so far and the total bytes of the share, first with
    0 bytes and then repeatedly. Matrices that the cache `cached` has are taken from there, and the
    others are written to it. A batch names an adapter by its index in `adapters`. With
    `takes_adapters`, adapters can be added later. With `pooling`, the last stage makes vectors
    (embeddings or scores). Raises AdapterError for an adapter that does not fit the model,
    UnsupportedModel for features that are not implemented, and CheckpointError for files that do
    not match the configuration. Unsupported features, and tensors that are missing or have wrong
    shapes, are found before any weight is read.
    """
    config.check()
    check_rank(tp_rank, tp_size)
    if not can_compute(quantization, device):
        raise UnsupportedModel(
            f"quantization {quantization} needs Triton on a GPU, and on a CPU the native kernels "
            "(`python -m kernels.build`)"
        )
    family = FAMILIES[config.architecture]
    layers = layer_range(config.n_layers, stage_index, n_stages)
    place = StagePlace.of(
        config, layers, pooling, ops=ops_for(device), tp_rank=tp_rank, tp_size=tp_size
    )
    wanted = WantedTensors(tp_rank, tp_size)
    read = partial(read_stage, config, place, pooling, dtype=dtype, device=device)
    read(source=wanted)
    open_source: Callable[..., TensorSource] = (
        RandomTensors
        if files is None
        else partial(CheckpointTensors, files, weight_format=config.weight_format, cached=cached)
    )
    source = open_source(
        wanted,
        dtype=dtype,
        device=device,
        on_progress=on_progress,
        quantization=quantization,
        activations=activations,
    )
    has_adapters = bool(adapters) or takes_adapters
    if has_adapters and not config.is_causal:
        raise UnsupportedModel(f"adapters: of {config.architecture}, an encoder, are not served")
    if has_adapters:
        places = _module_places(family, config, place, pooling)
        for adapter in adapters:
            places.check(adapter)
        adapted = AdaptedTensors(
            source, adapters, places, dtype=dtype, device=device, takes_any=takes_adapters
        )
        stage = read(source=adapted)
        stage.adaptable, stage.fitted = adapted.adaptable, tuple(adapted.fitted)
    else:
        stage = read(source=source)
    if cached is not None:
        cached.keep()
    return stage


def read_stage(
    config: ModelConfig,
    place: StagePlace,
    pooling: Pooling | None,
    *,
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
) -> StageModel:
    """Returns one rank's share of one stage, with tensors from `source`. Raises UnsupportedModel
    for features that are not implemented."""
    family = FAMILIES[config.architecture]
    stage = family(config, place, source=source, dtype=dtype, device=device)
    if pooling is not None and place.is_last:
        stage.pooler = stage.read_pooler(source, pooling)
    return stage


def _module_places(
    family: Family, config: ModelConfig, place: StagePlace, pooling: Pooling | None
) -> ModulePlaces:
    """Returns which modules of a model belong to this stage. If head and embedding share a matrix,
    it is read under the embedding's name, but only the head multiplies by it. So this product
    counts as the head's, and an adapter of the head changes it."""
    head, embedding = (
        name.removesuffix(".weight") for name in (family.head_name, family.embedding_name)
    )
    return ModulePlaces(
        layers_name=family.layers_name,
        n_layers=config.n_layers,
        layers=place.layers,
        head=head,
        has_head=place.is_last and place.has_head,
        aliases={embedding: head} if config.tie_word_embeddings else {},
        may_change_head=pooling is None or pooling.head != "yes-no",
    )


def random_stage(
    config: ModelConfig,
    *,
    stage_index: int = 0,
    n_stages: int = 1,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    activations: Activations = "rounded",
) -> StageModel:
    """Returns a stage with all of its layers and random weights. No file is read."""
    return build_stage(
        config,
        None,
        stage_index=stage_index,
        n_stages=n_stages,
        tp_rank=0,
        tp_size=1,
        dtype=dtype,
        device=device,
        on_progress=lambda n_done, n_total: None,
        quantization=quantization,
        activations=activations,
    )
