"""The tokens that ranks without a model return as sampled."""

FIRST_TOKEN_ID, N_TOKENS = 256, 512
"""The first id and the number of the tokens that are returned in turn. In models/demo these tokens
are pieces of words."""
