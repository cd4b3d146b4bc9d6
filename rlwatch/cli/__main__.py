"""``python -m rlwatch.cli``: the same as the ``rlwatch`` script."""

from rlwatch.cli.entry import main

if __name__ == "__main__":
    main()
