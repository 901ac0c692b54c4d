"""`python -m weft VERB ...`: the command line, where the script `weft` is not in the path."""

from weft.cli import main

if __name__ == "__main__":
    main()
