"""Typed decoding of JSON payloads into columns."""
