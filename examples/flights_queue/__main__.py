"""`python -m examples.flights_queue`: see `examples.flights_queue.app`."""

from __future__ import annotations

import sys

from examples.flights_queue.app import main

if __name__ == "__main__":
    sys.exit(main())
