"""Tests of the Pulsar backend, against a real standalone."""
