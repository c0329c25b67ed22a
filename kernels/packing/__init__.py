"""Chooses the form of a matrix that is fastest on a device; only this package knows all forms."""
