"""`python -m openzaya` is `openzaya`."""

import sys

from openzaya.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
