"""The accounts of K/V memory: how much each request may store, and in which blocks."""
