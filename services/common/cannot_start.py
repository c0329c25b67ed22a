"""The error that a service raises when it cannot start because of its settings, files or
devices."""


class CannotStart(ValueError):
    """A setting, a file or a device prevents a service from starting. The message names it.

    The operator can correct the cause of this error. A bug raises other errors, which are shown
    with their traceback.
    """
