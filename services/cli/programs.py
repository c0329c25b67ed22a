"""Commands that run a program with a model as first argument: `orcinus serve` and `orcinus tune`.

The program replaces this process. So signals reach the program, and its exit status is the exit
status of the command.
"""

import os
import sys
from collections.abc import Sequence

from services.cli.model import KINDS, find
from services.common.ending import refuse
from services.common.settings import PREFIX

_NAME_OPTION = "--served-model-name"


def serve(arguments: Sequence[str]) -> int:
    """Replaces this process by `python -m services.local`, which serves a model.

    If the model was fetched from a remote source, it is served under its name there, unless the
    settings give another name.
    """
    return _become("serve", "services.local", arguments, is_named=True)


def tune(arguments: Sequence[str]) -> int:
    """Replaces this process by `python -m services.tune`, which finds settings for a model."""
    return _become("tune", "services.tune", arguments, is_named=False)


def _become(command: str, module: str, arguments: Sequence[str], *, is_named: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(
            f"usage: orcinus {command} MODEL [options]\n\nMODEL is {KINDS}.\n"
            f"The options are those of python -m {module}, but for --model:\n\n"
        )
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, "--help"])
    if arguments[0].startswith("-"):
        refuse(f"orcinus {command}: MODEL comes before all options", ready_fd=None)
    os.execv(
        sys.executable,
        [sys.executable, "-m", module, *options_for(arguments, is_named=is_named)],
    )


def options_for(arguments: Sequence[str], *, is_named: bool) -> list[str]:
    """Returns the options for a program that uses a model.

    The first of `arguments` names the model and becomes the option `--model`. The other arguments
    are appended unchanged. With `is_named`, an option for the model's name at its remote source is
    added, unless the arguments or the environment set a name.

    Raises:
        NoModel: there is no such model.
    """
    model, rest = find(arguments[0]), list(arguments[1:])
    names = [f"{_NAME_OPTION}={model.name}"] if is_named and model.name else []
    has_name = f"{PREFIX}SERVED_MODEL_NAME" in os.environ or any(
        option.partition("=")[0] == _NAME_OPTION for option in rest
    )
    return [f"--model={model.path}", *([] if has_name else names), *rest]
