"""Code in threads beside an event loop: handlers, the messages that they get, and calls into the loop."""
