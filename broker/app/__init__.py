"""`App`: plain typed functions that handle messages, with state, layers and results that are published.

Read `docs/apps.md`. `app` registers and runs handlers, `signatures` reads what they take and return, `context` is what
they may ask for, and `layers` has those that come with the library.
"""

from broker.app.app import App, Running
from broker.app.context import BlockingContext, Context, make_context
from broker.app.layers import Call, CircuitBreaker, Layer, limit_rate

__all__ = [
    "App",
    "BlockingContext",
    "Call",
    "CircuitBreaker",
    "Context",
    "Layer",
    "Running",
    "limit_rate",
    "make_context",
]
