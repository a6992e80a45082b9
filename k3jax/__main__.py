"""`python -m k3jax` is the `k3jax` command."""

import sys

from k3jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
