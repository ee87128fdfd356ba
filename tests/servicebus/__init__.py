"""The Service Bus backend against the double, or against the namespace of `ANYBROKER_SERVICEBUS`."""
