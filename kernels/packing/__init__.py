"""The form of a matrix that is fastest on a device; the only place that knows all forms."""
