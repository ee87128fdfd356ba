"""The tracker: reads markers, and redelivers messages whose leases ended."""
