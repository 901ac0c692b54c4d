"""`python -m shardwise VERB ...`: the command line, where the script `shardwise` is not in the path."""

from shardwise.cli import main

if __name__ == "__main__":
    main()
