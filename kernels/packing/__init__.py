"""Chooses the form of a matrix that is fastest on a device. No other package knows all forms."""
