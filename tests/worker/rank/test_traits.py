"""Ranks tell apart what must be equal on all stages, before they load."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.common.adapters import adapters_in
from services.common.cannot_start import CannotStart
from services.worker.models.adapters.adapter import adapter_digest
from services.worker.rank.traits import traits_of
from services.worker.settings import PipelinePlace, WorkerSettings
from tests.adapters import write_adapter
from tests.checkpoints import write_checkpoint


def told(model: Path, *, tp_rank: int = 0, **settings: Any) -> dict[str, str]:
    return traits_of(WorkerSettings(model=model, **settings).for_rank(tp_rank))


def test_each_trait_changes_with_its_own_cause_alone(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "one")
    plain = told(model)
    assert (plain["model"], plain["dtype"], plain["block_size"]) == ("one", "float32", "16")
    assert all(plain.values())
    cases: dict[str, dict[str, Any]] = {
        "model": {"served_model_name": "other"},
        "dtype": {"dtype": "bfloat16"},
        "quantization": {"quantization": "int8"},
        "tp_size": {"tp_size": 2},
        "block_size": {"block_size": 32},
        "data_plane": {"device": "cuda"},
        "checkpoint": {"load_format": "random"},
    }
    for name, settings in cases.items():
        other = told(model, **settings)
        assert {key for key in plain if plain[key] != other[key]} == {name}
    other = told(model, tp_rank=1, stage_index=1, n_stages=3, kv_memory="5MiB", n_threads=2)
    assert other == plain, "stages of one pipeline may differ in these"
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    other = told(model)
    assert {key for key in plain if plain[key] != other[key]} == {"configuration"}


def test_another_checkpoint_of_equal_shapes_is_told_apart(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "one")
    plain = told(model)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    other = told(model)
    assert {key for key in plain if plain[key] != other[key]} == {"checkpoint"}


def test_each_adapter_is_told_with_its_digest(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "one")
    sizes = {"model.layers.0.self_attn.q_proj": (48, 48)}
    law, medicine = (
        write_adapter(tmp_path / name, sizes, ["q_proj"], seed=seed)
        for seed, name in enumerate(("law", "medicine"))
    )
    plain = told(model)
    assert not adapters_in(plain)
    with_both = told(model, adapters=f"law={law},org/medicine={medicine}")
    assert adapters_in(with_both) == {
        "law": adapter_digest(law),
        "org/medicine": adapter_digest(medicine),
    }
    assert with_both.items() >= plain.items()
    renamed = told(model, adapters=f"laws={law},org/medicine={medicine}")
    assert renamed["adapters"] != with_both["adapters"]
    with pytest.raises(CannotStart, match="no adapter"):
        told(model, adapters=f"law={tmp_path}")
    for wrong, why in ((f"{law}", "needs a name"), (f"-a={law}", "is no name")):
        with pytest.raises(ValidationError, match=why):
            told(model, adapters=wrong)


def test_a_model_that_is_missing_is_refused_before_there_is_a_stage(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"config\.json"):
        told(tmp_path)


def test_a_place_survives_its_message() -> None:
    place = PipelinePlace(3, 12)
    assert PipelinePlace.from_bytes(place.to_bytes()) == place


def test_where_receipts_are_made_every_byte_of_the_weights_counts(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "one")
    assert told(model).keys() & {"weights", "kernels", "max_model_len"} == set()
    with_receipts = told(model, receipts="on_request")
    served = {
        told(model, receipts="on_request", max_model_len=it)["max_model_len"] for it in (8, 9)
    }
    assert served == {"8", "9"}
    assert with_receipts["kernels"].partition("-")[0] in ("native", "pytorch")
    weights = model / "model.safetensors"
    line = f"{hashlib.sha256(weights.read_bytes()).hexdigest()}  {weights.name}\n"
    assert with_receipts["weights"] == hashlib.sha256(line.encode()).hexdigest()
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert told(model, receipts="always")["weights"] != with_receipts["weights"]
    with pytest.raises(CannotStart, match="receipts: not with load_format random"):
        told(model, receipts="always", load_format="random")
