"""`python -m specbatch` is the command line."""

import sys

from specbatch.cli import main

sys.exit(main())
