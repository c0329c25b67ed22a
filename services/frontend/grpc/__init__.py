"""The gRPC API: translates between the messages of orcinus.v1.InferenceService and the requests and
answers of the frontend."""
