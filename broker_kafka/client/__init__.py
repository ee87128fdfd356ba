"""Threads that own a client of confluent-kafka, and what they send and receive."""
