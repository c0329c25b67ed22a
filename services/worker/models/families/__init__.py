"""The model families, one file each: a configuration and what its stage fills in.

`services.worker.models.registry` lists them; docs/adding-a-model.md says how one is added.
"""
