"""An engine behind an HTTP server with the interface of the OpenAI API, and endpoints for our trainer."""
