"""Reads through Spark's own Kafka connector."""
