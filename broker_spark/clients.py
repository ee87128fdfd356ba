"""Says what to install where Spark is missing. Imported first, so that nothing else of the package fails before."""

from __future__ import annotations

from importlib import import_module

from broker.errors import MissingClient

__all__: list[str] = []

for _name in ("pyspark", "pyarrow"):
    try:
        import_module(_name)
    except ImportError as error:
        raise MissingClient(
            f"broker_spark needs {_name}, which is not installed",
            native=error,
            advice="Run: pip install 'anybroker[spark]'",
        ) from None
