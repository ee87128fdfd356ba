"""Servers and processes that die, freeze or are cut off in the middle of work; every message is counted."""
