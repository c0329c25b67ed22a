"""The server's own paths: the page that shows the pipeline at work; and the spans of requests."""
