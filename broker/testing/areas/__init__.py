"""The conformance tests, one module per area; `broker.testing.conformance` puts them together."""
