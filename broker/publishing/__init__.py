"""Publishing: topics, the pipeline behind `enqueue`, order per key, and transactions."""
