"""The media types of answers."""

JSON = "application/json"
EVENTS = "text/event-stream"
