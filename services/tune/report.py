"""The table that the tuner prints, and the files that it writes.

`local.env` has the settings as environment variables of `services.local`. `kustomization.yaml` is a
kustomize component for an overlay of `k8s/`, with the same settings for scheduler and workers. Both
files have the reasons for the settings as comments.
"""

import errno
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.tune.choice import Tuned
from services.tune.reasons import reasons
from services.tune.search import Prediction
from services.tune.settings import TuneSettings

ENV_FILE, COMPONENT_FILE = "local.env", "kustomization.yaml"


def table(tuned: Tuned, unit: str) -> list[str]:
    """Returns the lines of a table of predicted and measured values, which are in the unit `unit`.
    The first row has the chosen settings."""
    rows = [("", "settings", f"predicted {unit}", "measured")]
    predictions = {each.candidate: each for each in _predictions(tuned)}
    chosen = tuned.chosen.candidate
    for candidate in sorted(predictions, key=lambda each: each != chosen):
        prediction, check = predictions[candidate], tuned.checks.get(candidate)
        measured = ""
        if check is not None:
            measured = f"{check.value:.4g}" + " (a part)" * (not check.is_whole)
        rows.append(
            ("*" * (candidate == chosen), str(candidate), f"{prediction.value:.4g}", measured)
        )
    widths = [max(len(row[index]) for row in rows) for index in range(4)]
    return [
        " ".join(
            (
                row[0].ljust(widths[0]),
                row[1].ljust(widths[1]),
                row[2].rjust(widths[2]),
                row[3].rjust(widths[3]),
            )
        ).rstrip()
        for row in rows
    ]


def variables(settings: TuneSettings, tuned: Tuned) -> dict[str, str]:
    """Returns the chosen settings as environment variables of `services.local`."""
    candidate = tuned.chosen.candidate
    found: dict[str, object] = {
        "MODEL": settings.model.resolve(),
        "STAGES": candidate.layout.stages,
        "TP": candidate.layout.tp,
        "THREADS": candidate.layout.threads,
        "MAX_BATCH_SIZE": candidate.max_batch_size,
        "MAX_BATCH_TOKENS": candidate.max_batch_tokens,
        "KV_MEMORY": tuned.kv_memory,
        "DTYPE": settings.dtype,
        "QUANTIZATION": settings.quantization,
    }
    if settings.load_format != "safetensors":
        found["LOAD_FORMAT"] = settings.load_format
    if settings.worker:
        found["WORKER"] = ",".join(f"{name}={value}" for name, value in settings.worker)
    return {f"ORCINUS_{name}": str(value) for name, value in found.items()}


def command(settings: TuneSettings, tuned: Tuned) -> str:
    """Returns the command that serves with the chosen settings."""
    options = [
        f"--{name.removeprefix('ORCINUS_').lower().replace('_', '-')}={value}"
        for name, value in variables(settings, tuned).items()
    ]
    return shlex.join([sys.executable, "-m", "services.local", *options])


def make_directory(settings: TuneSettings) -> None:
    """Creates the directory for the files. The tuner calls this function before it measures, so
    that an error is found at once and not after minutes.

    Raises:
        OSError: the directory cannot be created or written.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    if not os.access(settings.out, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(settings.out))


def write(settings: TuneSettings, tuned: Tuned) -> list[Path]:
    """Writes the chosen settings and the reasons for them into two files, and returns the paths of
    the files.

    Raises:
        OSError: the files cannot be written.
    """
    make_directory(settings)
    why = [f"# {line}" for line in reasons(tuned)]
    env_file, component_file = settings.out / ENV_FILE, settings.out / COMPONENT_FILE
    env_file.write_text(
        "\n".join(
            [
                f"# To serve with these: set -a; . {shlex.quote(str(env_file))}; set +a; "
                f"{shlex.quote(sys.executable)} -m services.local",
                *why,
                *(
                    f"{name}={shlex.quote(value)}"
                    for name, value in variables(settings, tuned).items()
                ),
                "",
            ]
        )
    )
    component_file.write_text("\n".join([*component(settings, tuned, why), ""]))
    return [env_file, component_file]


def component(settings: TuneSettings, tuned: Tuned, why: Sequence[str]) -> list[str]:
    """Returns the lines of a kustomize component with the chosen settings. `why` has the reasons
    for the settings, which become comments."""
    candidate, layout = tuned.chosen.candidate, tuned.chosen.candidate.layout
    of_weights = {"DTYPE": settings.dtype, "QUANTIZATION": settings.quantization}
    return [
        "# Found by `python -m services.tune`. An overlay lists it, and then components/stages.",
        *why,
        "apiVersion: kustomize.config.k8s.io/v1alpha1",
        "kind: Component",
        "configMapGenerator:",
        *_merged("orcinus-pipeline", {"N_STAGES": layout.stages}),
        *_merged(
            "orcinus-scheduler-settings",
            {
                "MAX_BATCH_SIZE": candidate.max_batch_size,
                "MAX_BATCH_TOKENS": candidate.max_batch_tokens,
            },
        ),
        *_merged(
            "orcinus-worker-settings",
            {
                "TP_SIZE": layout.tp,
                "N_THREADS": layout.threads,
                "KV_MEMORY": tuned.kv_memory,
                **of_weights,
            },
        ),
    ]


def _merged(name: str, settings: Mapping[str, object]) -> list[str]:
    return [
        f"  - name: {name}",
        "    behavior: merge",
        "    literals:",
        *(f"      - ORCINUS_{key}={value}" for key, value in settings.items()),
    ]


def _predictions(tuned: Tuned) -> list[Prediction]:
    """Returns the predictions for the candidates that were run, and for the best candidate of each
    layout."""
    checked = [
        each.predictor(candidate)
        for candidate in tuned.checks
        for each in tuned.tried
        if each.layout == candidate.layout
    ]
    return [*checked, *(each.best for each in tuned.tried)]
