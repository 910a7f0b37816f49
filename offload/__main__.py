"""`python -m offload`."""

from __future__ import annotations

import sys

from offload.cli import main

if __name__ == "__main__":
    sys.exit(main())
