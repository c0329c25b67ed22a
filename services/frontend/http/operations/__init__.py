"""Paths for operating the server: probes, and the page that shows the pipeline at work. Also the
spans of requests."""
