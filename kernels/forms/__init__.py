"""Descriptions of the variants of layers that models have, and of the columns of a batch."""
