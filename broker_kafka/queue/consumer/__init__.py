"""The consumer: starts, hands over and settles messages."""
