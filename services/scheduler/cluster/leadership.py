"""The errors that are raised when this process does not lead any more."""


class LeadershipLost(Exception):
    """Raised when this process does not lead any more."""


class GivenAway(LeadershipLost):
    """Raised when this process has given the lease away."""
