"""`python -m dhelix`: the command line, for environments whose PATH lacks the `dhelix` script."""

from dhelix.launch.cli import main

if __name__ == "__main__":
    main()
