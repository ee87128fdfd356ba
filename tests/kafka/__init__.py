"""Tests of the Kafka backend, against a real broker."""
