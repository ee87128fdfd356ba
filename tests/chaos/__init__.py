"""Servers and processes are killed, frozen or cut off under load; every message is accounted for."""
