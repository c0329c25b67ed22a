"""Compares an adapter's tokenizer and chat template with the model's.

Training programs write a copy of both into the adapter's directory. All requests are encoded with
the tokenizer and the chat template of the model. So an adapter that was trained with another
tokenizer or template is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common import bounded_file
from services.common.regular_file import open_regular_by_links
from services.common.tokenizer_files.find import MAX_FILE_BYTES, TOKENIZER_JSON, tokenizer_file
from services.worker.models.adapters.adapter_config import AdapterError

_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_TEMPLATE_JSON = "chat_template.json"
_KEY = "chat_template"

_MAX_BYTES = 16 << 20

_NOT_COMPARED = ("truncation", "padding", "version")
"""Keys of a `tokenizer.json` that are not compared: the file's version, and how batches for
training are padded and cut."""

_ROLES = ("bos_token", "eos_token")


def check_text_files(name: str, adapter: Path, model: Path) -> None:
    """Checks that the files in an adapter's directory have the same tokenizer and chat template as
    the model. Files that are not there are not checked.

    Raises:
        AdapterError: a file differs, or cannot be read. The message names the adapter `name`.
    """
    try:
        _check_tokenizer(adapter, model)
        _check_config(adapter, model)
    except OSError as error:
        file = Path(str(error.filename)).name
        raise AdapterError(f"adapter {name}: {file}: {error.strerror}") from error
    except ValueError as error:
        # Clients may see the message, and must not see where files are.
        message = str(error).replace(f"{adapter}/", "").replace(f"{model}/", "the model's ")
        raise AdapterError(f"adapter {name}: {message}") from error


def _check_tokenizer(adapter: Path, model: Path) -> None:
    own, other = tokenizer_file(adapter), tokenizer_file(model)
    if not own.is_file():
        return
    if own.name != other.name:
        raise ValueError(
            f"{own.name} cannot be compared with {other.name}, the model's tokenizer; remove it if "
            "the adapter was trained with the model's"
        )
    if _tokenizer(own) != _tokenizer(other):
        raise ValueError(f"{own.name} is another tokenizer than the model's")


def _tokenizer(file: Path) -> object:
    """Returns the content of a tokenizer's file that is compared: all of it, or a `tokenizer.json`
    without the keys `_NOT_COMPARED`."""
    if file.name != TOKENIZER_JSON:
        return _read_bytes(file)
    found = bounded_file.read_json_object(
        file, max_bytes=MAX_FILE_BYTES, opener=open_regular_by_links
    )
    return {key: value for key, value in found.items() if key not in _NOT_COMPARED}


def _check_config(adapter: Path, model: Path) -> None:
    if not model.is_dir():
        return  # a GGUF file has its template and its tokens in its header
    own, other = _read(adapter / _CONFIG), _read(model / _CONFIG)
    for role in _ROLES:
        if role in own and role in other and _text(own[role]) != _text(other[role]):
            raise ValueError(f"{_CONFIG}: {role} is another one than the model's")
    template = _template(adapter, own)
    if template is not None and template != _template(model, other):
        raise ValueError("the chat template is another one than the model's")


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    return bounded_file.read_json_object(path, max_bytes=_MAX_BYTES, opener=open_regular_by_links)


def _read_bytes(path: Path) -> bytes:
    return bounded_file.read_bytes(path, max_bytes=MAX_FILE_BYTES, opener=open_regular_by_links)


def _text(token: object) -> object:
    """Returns the text of a token. A token is written as a text, or as an object with the text
    under `content`."""
    return token.get("content") if isinstance(token, Mapping) else token


def _template(directory: Path, config: Mapping[str, Any]) -> object:
    """Returns the chat template in a directory, or None if there is none. A separate file takes
    precedence over `config`, the content of `tokenizer_config.json`."""
    if (directory / _TEMPLATE).is_file():
        return _read_bytes(directory / _TEMPLATE).decode()
    return _read(directory / _TEMPLATE_JSON).get(_KEY) or config.get(_KEY)
