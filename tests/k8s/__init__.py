"""The manifests, rendered; held against schemas, one another and the services' settings."""
