"""Kafka as a queue whose messages are settled one by one: markers tell of each message what became of it.

*The protocol.* Who takes a message writes a START to the marker topic before it is handed over, KEEPALIVEs while it is
held, and an END when it is done. A tracker reads the markers: a message that has a START and neither an END nor a
KEEPALIVE in time is sent again as a new message, followed by an END of the old one.
"""
