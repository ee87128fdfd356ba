"""The connection to a cluster, and requests to its brokers."""
