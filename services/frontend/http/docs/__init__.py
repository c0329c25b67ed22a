"""The description of the API: the OpenAPI document, and the page that shows it."""
