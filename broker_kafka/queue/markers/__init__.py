"""The marker protocol: bytes, topic, producers, and what is published in place of a due message."""
