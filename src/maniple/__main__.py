"""`python -m maniple`: the command line, also the program that torchrun starts on every rank."""

import sys

from maniple.cli import main

if __name__ == "__main__":
    sys.exit(main())
