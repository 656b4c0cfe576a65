"""`python -m services.cli`: the `rookery` command."""

import sys

from services.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
