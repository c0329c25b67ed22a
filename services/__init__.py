"""The processes of Orcinus. `services.X` is run as `python -m services.X`; they meet only through protos."""
