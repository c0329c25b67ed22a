"""The tokens that ranks without a model sample."""

FIRST_TOKEN_ID, N_TOKENS = 256, 512
"""The range of tokens that are sampled in turn; in models/demo these tokens are pieces of words."""
