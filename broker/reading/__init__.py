"""The Record family: `RecordConsumer`, serving records as messages, and reading a log without a group."""
