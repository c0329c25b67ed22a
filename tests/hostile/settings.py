"""The settings of the frontends that are attacked here: those of production, with shorter waits.

An attacker that holds on for eight seconds must meet each limit of time.
"""

import hashlib
import json
from pathlib import Path

from services.frontend.settings import FrontendSettings

API_KEY = "orc-attacker"
SHORT_WAITS = {
    name: value
    for name, value in {
        "head_limit_s": 3,
        "body_limit_s": 4,
        "idle_limit_s": 4,
        "send_limit_s": 3,
    }.items()
    if name in FrontendSettings.model_fields
}


def frontend_options(**others: object) -> dict[str, object]:
    """Returns the options of a frontend, as its command line spells them."""
    return {name.replace("_", "-"): value for name, value in {**SHORT_WAITS, **others}.items()}


def write_keys(directory: Path) -> Path:
    """Writes a file with the attacker's key, which allows two answers at once; returns its path."""
    path = directory / "keys.json"
    sha256 = hashlib.sha256(API_KEY.encode()).hexdigest()
    key = {"name": "attacker", "sha256": sha256, "max_in_flight": 2}
    path.write_text(json.dumps({"keys": [key]}))
    return path
