"""`python -m dhelix`: the command line, where the script `dhelix` is not on the path."""

from dhelix.launch.cli import main

if __name__ == "__main__":
    main()
