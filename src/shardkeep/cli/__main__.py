"""`python -m shardkeep.cli`, the same as the `shardkeep` command."""

from shardkeep.cli import main

main()
