"""The models that one frontend serves. Each has its own service and its own link to a scheduler, so
that losing one model leaves the others as they are. A call names the model that it is for."""
