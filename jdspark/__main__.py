"""`python -m jdspark`, the same as the `jdspark` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
