"""Real chat templates, which are not part of the repository.

`CHAT_TEMPLATES` names a directory that holds them as files `*.jinja`. Without it, they are looked
for beside the repository. Tests of them are skipped if there are none.
"""

import os
from pathlib import Path

_BESIDE = Path(__file__).parents[4] / "shared" / "data" / "templates"
PATHS = tuple(sorted(Path(os.environ.get("CHAT_TEMPLATES", _BESIDE)).glob("*.jinja")))
