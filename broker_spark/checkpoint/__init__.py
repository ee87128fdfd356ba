"""The state of queries in Spark's checkpoint: positions and topic ids."""
