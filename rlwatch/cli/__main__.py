"""Make ``python -m rlwatch.cli`` run the ``rlwatch`` command."""

from rlwatch.cli.entry import main

if __name__ == "__main__":
    main()
