"""`maniple` and `python -m maniple`: the command line, also the program that torchrun starts on every rank."""

import sys


def main() -> int:
    """Runs the command line, and ends without a traceback where Ctrl-C comes before it is there."""
    try:
        from maniple import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
