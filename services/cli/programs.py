"""Commands that run another program: `orcinus serve`, `orcinus tune` and `orcinus arena`.

The program replaces this process. So signals reach the program, and its exit status is the exit
status of the command.
"""

import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from services.cli.model import KINDS, find
from services.common.by_model import SEPARATOR, pair_in
from services.common.ending import refuse
from services.common.gguf.header import model_name
from services.common.settings import PREFIX

_NAME_OPTION = "--served-model-name"
_ADAPTERS_OPTION = "--adapters"


def serve(arguments: Sequence[str]) -> int:
    """Replaces this process by `python -m services.local`, which serves a model, or several.

    If a model was fetched from a remote source, it is served under its name there, unless the
    settings give another name.
    """
    return _become("serve", "services.local", arguments, takes_several=True)


def tune(arguments: Sequence[str]) -> int:
    """Replaces this process by `python -m services.tune`, which finds settings for a model."""
    return _become("tune", "services.tune", arguments, takes_several=False)


def arena(arguments: Sequence[str]) -> int:
    """Replaces this process by `python -m services.arena`, which compares policies."""
    os.execv(sys.executable, [sys.executable, "-m", "services.arena", *arguments])


def _become(command: str, module: str, arguments: Sequence[str], *, takes_several: bool) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        more, naming = (
            (" [MODEL …]", " Of several, NAME=MODEL names one.") if takes_several else ("", "")
        )
        sys.stdout.write(
            f"usage: orcinus {command} MODEL{more} [options]\n\nMODEL is {KINDS}.{naming}\n"
            f"The options are those of python -m {module}, but for --model:\n\n"
        )
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, "--help"])
    if arguments[0].startswith("-"):
        refuse(f"orcinus {command}: MODEL comes before all options", ready_fd=None)
    models = tuple(takewhile(lambda argument: not argument.startswith("-"), arguments))
    has_names = any(_name_and_model(text)[0] for text in models)
    if takes_several and (len(models) > 1 or has_names):
        options = [*options_for_several(models), *arguments[len(models) :]]
    else:
        options = options_for(arguments, is_named=takes_several)
    if takes_several:
        options = with_adapters(options)
    os.execv(sys.executable, [sys.executable, "-m", module, *options])


def options_for_several(texts: Sequence[str]) -> list[str]:
    """Returns the options for a program that serves several models. Each of `texts` is a model or
    NAME=MODEL. If NAME is missing, the model is served under its name at the remote source, or else
    under the name of its directory.

    Raises:
        NoModel: a model does not exist, or cannot be fetched.
    """
    return [f"--model={_named(text)}" for text in texts]


def with_adapters(options: Sequence[str]) -> list[str]:
    """Returns `options` with the sources of adapters, NAME=SOURCE, replaced by directories,
    NAME=DIRECTORY. Adapters at remote sources are fetched if needed.

    Raises:
        NoModel: an adapter does not exist, or cannot be fetched.
    """
    found, is_value = [], False
    for option in options:
        name, equals, value = option.partition("=")
        if is_value:
            found.append(_fetched(option))
        elif name == _ADAPTERS_OPTION and equals:
            found.append(f"{name}={_fetched(value)}")
        else:
            found.append(option)
        is_value = option == _ADAPTERS_OPTION
    return found


def _fetched(adapters: str) -> str:
    """Converts a list of adapters, NAME=SOURCE separated by commas, to NAME=DIRECTORY separated by
    commas. Fetches adapters if needed."""
    pairs = [pair_in(text) for text in SEPARATOR.split(adapters)]
    return ",".join(
        f"{name}={find(source).path.absolute()}" if name else source for name, source in pairs
    )


def _named(text: str) -> str:
    """Converts a model, given alone or as NAME=MODEL, to NAME=DIRECTORY. Fetches the model if
    needed."""
    name, model = _name_and_model(text)
    found = find(model)
    return f"{name or found.name or model_name(found.path)}={found.path.absolute()}"


def _name_and_model(text: str) -> tuple[str, str]:
    """Returns the two parts of NAME=MODEL. If the text is a model without a name, the first part is
    empty."""
    return ("", text) if Path(text).expanduser().exists() else pair_in(text)


def options_for(arguments: Sequence[str], *, is_named: bool) -> list[str]:
    """Returns the options for a program that uses a model.

    The first of `arguments` names the model and becomes the option `--model`. The other arguments
    are appended unchanged. If `is_named` is true and the model has a name at its remote source, an
    option with this name is added, unless the arguments or the environment set a name.

    Raises:
        NoModel: there is no such model, or it cannot be fetched.
    """
    model, rest = find(arguments[0]), list(arguments[1:])
    names = [f"{_NAME_OPTION}={model.name}"] if is_named and model.name else []
    has_name = f"{PREFIX}SERVED_MODEL_NAME" in os.environ or any(
        option.partition("=")[0] == _NAME_OPTION for option in rest
    )
    return [f"--model={model.path}", *([] if has_name else names), *rest]
