"""The media types of answers."""

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
