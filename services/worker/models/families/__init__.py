"""The model families, one file each: a configuration, and the methods that a stage overrides.

`services.worker.models.registry` lists the families; docs/adding-a-model.md explains how to add
one.
"""
