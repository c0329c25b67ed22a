"""Chooses the form of a matrix that is fastest on its device. No other package uses all the
forms."""
