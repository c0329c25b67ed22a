"""Fetches checkpoints from the Hugging Face Hub or from S3-compatible storage: a name becomes a
directory of this machine or of a claim.

It fetches only files that serving reads, and nothing that runs code when it is read. Files from the
hub go into the cache that other programs use, too. It knows no models: whether a checkpoint can be
served is decided elsewhere.
"""
