"""The error of a service that cannot start with its settings."""


class CannotStart(ValueError):
    """A setting, a file or a device prevents a service from starting; the message names it.

    The operator can correct such an error. A bug is another kind of error, and keeps its traceback.
    """
