"""The Message family: `MessageConsumer`, and each of its promises as a mechanism in a module of its own."""
