"""Fetches checkpoints from the Hugging Face Hub or from S3-compatible storage into a directory.

The directory is on this machine or on a shared volume. The package fetches only files that serving
needs. It fetches no files that run code when they are loaded. Files from the hub go into the cache
of the hub's library, which other programs share. The package does not check whether a checkpoint
can be served.
"""
