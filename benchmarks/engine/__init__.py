"""How fast one stage computes, how exact its numbers are, and what its weights cost to load."""
