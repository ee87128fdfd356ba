"""The conformance tests, one module per area; `broker.testing.conformance` collects them."""
