"""The media types of answers."""

JSON = "application/json"
EVENTS = "text/event-stream"
HTML = "text/html; charset=utf-8"
