"""The Message family: `MessageConsumer`, with each of its mechanisms in a module of its own."""
