"""Checkpoints from elsewhere, the Hugging Face Hub or S3-compatible storage: a name becomes a
directory of this machine or of a claim.

It fetches what serving reads and nothing else, above all nothing that runs code when it is read.
What comes from the hub goes into the cache that other programs have as well. Knows no model:
whether a checkpoint can be served is for others to say.
"""
