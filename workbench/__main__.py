"""`python -m workbench` is the same program as `wb`."""

import sys

from workbench.cli import main

sys.exit(main())
