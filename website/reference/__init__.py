"""Pages of reference that are made from code: the HTTP API from its OpenAPI document, and the gRPC
APIs from the comments of the protos."""
