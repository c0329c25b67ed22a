"""The settings of the attacked frontends: the settings of production, with shorter timeouts.

An attacker that holds on for eight seconds must meet each limit of time. A stream that is broken is
given up as late as in production, which a tree that ends with its first service would do at once.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from services.frontend.settings import FrontendSettings
from tests.hostile.attack import SystemName

N_DESCRIPTORS = 1024
API_KEY, HONEST_KEY = "orc-attacker", "orc-honest"
SHORT_WAITS = {
    "head_limit_s": 3,
    "body_limit_s": 6,
    "idle_limit_s": 4,
    "send_limit_s": 5,
    "client_silence_limit_s": 7,
}
"""Seconds."""
PATIENCE = {name: FrontendSettings.model_fields[name].default for name in ("hold_s", "resume_s")}
MAX_CONNECTIONS = 380
"""Connections of the frontend that has few descriptors."""


def frontend_options(**others: object) -> dict[str, object]:
    """Returns the options of a frontend, as its command line spells them."""
    options = {**SHORT_WAITS, **PATIENCE, **others}
    return {name.replace("_", "-"): value for name, value in options.items()}


def systems(directory: Path) -> dict[SystemName, dict[str, Any]]:
    """Returns the options of each system that is attacked; files are written into the directory."""
    few = frontend_options(max_connections=MAX_CONNECTIONS)
    return {
        "open": {"frontend": frontend_options()},
        "keys": {
            "frontend": frontend_options(api_keys_file=str(write_keys(directory))),
            "api_key": API_KEY,
            "honest_key": HONEST_KEY,
        },
        "few descriptors": {"frontend": few, "n_descriptors": N_DESCRIPTORS},
    }


def write_keys(directory: Path) -> Path:
    """Writes a file with the attacker's key, which allows two answers at once, and with the honest
    clients'; returns its path."""
    path = directory / "keys.json"
    keys = [
        {"name": "attacker", "sha256": _hash(API_KEY), "max_in_flight": 2},
        {"name": "honest", "sha256": _hash(HONEST_KEY)},
    ]
    path.write_text(json.dumps({"keys": keys}))
    return path


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
