"""The source that reads logs by offset ranges."""
