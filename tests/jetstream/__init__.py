"""The JetStream backend against a real nats-server."""
