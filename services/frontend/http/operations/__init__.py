"""Paths for operating the server: probes, and the page that shows the pipeline at work. The tracing
spans of requests are made here as well."""
