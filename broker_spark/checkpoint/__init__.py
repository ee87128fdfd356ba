"""What queries keep in Spark's checkpoint."""
