"""The Record family: `RecordConsumer`, and reading a log without a group."""
