"""``python -m memplan``: the same as the ``memplan`` script."""

import sys

from memplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
