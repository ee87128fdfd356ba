"""`python -m examples.flights`: see `examples.flights.app`."""

from __future__ import annotations

import sys

from examples.flights.app import main

if __name__ == "__main__":
    sys.exit(main())
