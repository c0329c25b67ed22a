"""Checks settings of the local launcher before it starts any service.

Without these checks, a wrong setting would fail seconds or minutes later, in a service. The
services check all settings again.
"""

import ipaddress
from pathlib import Path

from services.common import bounded_file
from services.common.address import LOCALHOST, loopback
from services.common.gguf.header import is_gguf, read_header
from services.common.gguf.model_config import model_config
from services.common.tokenizer_files.find import tokenizer_file
from services.local.settings import LocalSettings

MAX_CONFIG_BYTES = 2**20
ADAPTER_CONFIG = "adapter_config.json"
OF_ONE_FRONTEND = {"http-socket", "grpc-socket", "health-address", "metrics-address"}
"""Settings of a frontend that no two frontends can share."""
LAYER_KEYS = ("num_hidden_layers", "n_layer")
"""Keys of `config.json` that may hold the number of layers. GPT-2 uses the second one."""


def trouble_with(settings: LocalSettings) -> str:
    """Returns the reason why the models cannot be served on this machine with the settings, or an
    empty text if no problem is found."""
    try:
        loopback()
    except OSError:
        return "this machine has no address of loopback: neither 127.0.0.1 nor ::1"
    for _, model in settings.model:
        if trouble := _trouble_with_model(model, settings.stages):
            return trouble
    for name, directory in settings.adapters:
        if not (directory / ADAPTER_CONFIG).is_file():
            return f"adapters: no {ADAPTER_CONFIG} in {directory}, which is to be {name}"
    own = {name.replace("_", "-") for name, _ in settings.frontend} & OF_ONE_FRONTEND
    if own and settings.n_frontends > 1:
        return f"frontend: {min(own)} is for one frontend, and frontends is {settings.n_frontends}"
    return _trouble_with_receipts(settings) or _trouble_with_pipelines(settings)


def _trouble_with_pipelines(settings: LocalSettings) -> str:
    """Returns the reason why the scheduler cannot run as many pipelines as the settings ask for.
    The result is empty if no problem is found."""
    limit = dict(settings.scheduler).get("max-pipelines", "")
    if limit.isdecimal() and int(limit) < settings.pipelines:
        return (
            f"pipelines: {settings.pipelines} are more than max_pipelines={limit} of the scheduler"
        )
    return ""


def _trouble_with_receipts(settings: LocalSettings) -> str:
    """Returns why receipts cannot be signed. The result is empty if no problem is found."""
    file = settings.receipt_keys_file
    if settings.receipts == "off" or (file is not None and file.is_file()):
        return ""
    if file is None:
        return f"receipt_keys_file: must be given with receipts={settings.receipts}"
    return f"receipt_keys_file: there is no file {file}"


def _trouble_with_model(model: Path, n_stages: int) -> str:
    """Returns the reason why a model cannot be served in `n_stages` stages, or an empty text if no
    problem is found."""
    if not model.is_dir() and not model.is_file():
        return f"model: there is no directory {model}"
    if model.is_file() and not is_gguf(model):
        return f"model: {model} is no directory and no GGUF file"
    for file in (model / "config.json", tokenizer_file(model)):
        if model.is_dir() and not file.is_file():
            return f"model: no {file.name} in {model}"
    try:
        if is_gguf(model):
            config = model_config(read_header(model))
        else:
            config = bounded_file.read_json_object(
                model / "config.json", max_bytes=MAX_CONFIG_BYTES
            )
    except (OSError, ValueError) as error:
        return f"model: {error}"
    n_layers = next((config[key] for key in LAYER_KEYS if isinstance(config.get(key), int)), None)
    if n_layers is not None and n_layers < n_stages:
        return f"stages: {n_layers} layers cannot be divided among {n_stages} stages"
    return ""


def is_open_to_all(settings: LocalSettings) -> bool:
    """Returns whether clients on other machines may call the APIs without a key."""
    if settings.api_keys_file is not None or settings.host == LOCALHOST:
        return False
    try:
        return not ipaddress.ip_address(settings.host).is_loopback
    except ValueError:  # a name
        return True
