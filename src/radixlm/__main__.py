"""`python -m radixlm` is the `radixlm` command."""

import sys

from radixlm.cli.main import main

sys.exit(main())
