"""python -m aggregator"""

import sys

from aggregator.cli import main

if __name__ == "__main__":
    sys.exit(main())
