"""Tests of the Pub/Sub backend, on Google's emulator."""
