"""Administration of topics and consumer groups."""
