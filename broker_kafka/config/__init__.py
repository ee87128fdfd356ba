"""Properties, security, OAuth and queue settings of the client."""
