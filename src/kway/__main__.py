"""``python -m kway`` is the command ``kway``."""

import sys

from kway.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
