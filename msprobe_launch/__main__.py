"""`python -m msprobe_launch` is `msprobe-launch`."""

import sys

from msprobe_launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
