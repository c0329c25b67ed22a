"""The error of a service that cannot start as it is told to."""


class CannotStart(ValueError):
    """A setting, a file or a device with which a service cannot start; the message names it. It is
    what a person can set right: a bug is something else, and keeps its traceback."""
