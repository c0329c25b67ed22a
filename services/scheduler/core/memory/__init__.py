"""The accounts of K/V memory: who may store how much, and where."""
