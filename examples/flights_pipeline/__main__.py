"""`python -m examples.flights_pipeline`: see `examples.flights_pipeline.app`."""

from __future__ import annotations

import sys

from examples.flights_pipeline.app import main

if __name__ == "__main__":
    sys.exit(main())
