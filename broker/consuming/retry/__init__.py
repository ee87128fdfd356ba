"""Retries: the policy, retry topics, and the writer that sends messages there."""
