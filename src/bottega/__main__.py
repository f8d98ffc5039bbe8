"""`python -m bottega` is the command `bottega`."""

from bottega.cli import main

if __name__ == "__main__":
    main()
