"""`python -m examples.flights_streams`: see `examples.flights_streams.app`."""

from __future__ import annotations

import sys

from examples.flights_streams.app import main

if __name__ == "__main__":
    sys.exit(main())
