"""Descriptions of the variants of layers that models use, and of the per-row data of a batch."""
