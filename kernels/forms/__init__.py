"""Descriptions of the variants of layers that models use, and of the columns of a batch."""
