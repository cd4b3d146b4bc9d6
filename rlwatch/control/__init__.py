"""The way back: from a person's command, as a row, to the live trainer.

``mailbox`` carries commands from the writer thread to the training thread and the answers back;
``policy`` knows when to refuse; ``request`` writes a person's wish down.
"""
