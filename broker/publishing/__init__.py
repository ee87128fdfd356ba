"""Publishing: topics, the pipeline behind `enqueue`, limits, and transactions."""
