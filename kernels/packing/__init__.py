"""Chooses the fastest form of a matrix on its device. No other package uses all the forms."""
