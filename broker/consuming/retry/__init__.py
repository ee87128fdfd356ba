"""Retry."""
