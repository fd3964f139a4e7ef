"""`python -m fullshard`."""

from fullshard.cli import main

raise SystemExit(main())
