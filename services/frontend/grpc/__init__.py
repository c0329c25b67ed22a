"""The gRPC API: orcinus.v1.InferenceService, translated to and from generation requests."""
