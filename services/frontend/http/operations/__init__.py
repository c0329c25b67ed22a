"""Paths for operating the server: probes, metrics, the keys that check receipts, and the page that
shows the pipeline at work. The tracing spans of requests are made here as well."""
