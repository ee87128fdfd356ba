"""Queues on Kafka whose messages are settled one by one: markers in a topic of their own record the state of each.

*The protocol.* A consumer writes a START to the marker topic before it hands a message over, KEEPALIVEs while it holds
the message, and an END when it is done. A tracker reads the markers: a message with a START, and neither an END nor a
KEEPALIVE in time, is published again, followed by an END of the old one.
"""
