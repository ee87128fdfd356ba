"""Kafka connector."""
