"""A test double of Azure Service Bus, on python-qpid-proton: an implementation of its protocol, not the service.

No server of Microsoft's can be installed without containers. What the double answers follows the published protocol
guide, "AMQP 1.0 in Service Bus: request-response-based operations", and what azure-servicebus insists on. The same
tests run against a real namespace where `ANYBROKER_SERVICEBUS` holds its connection string.
"""

from __future__ import annotations

from tests.servers.servicebus.double import ServiceBusDouble, missing, shared_double

__all__ = ["ServiceBusDouble", "missing", "shared_double"]
