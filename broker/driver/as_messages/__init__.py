"""Serves records as messages: a `MessageSource` over a `RecordSource`."""
