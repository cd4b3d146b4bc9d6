"""The way back: from a person's command, as a row, to the live trainer.

``kinds`` lists what can be asked, ``request`` writes a person's wish down; ``mailbox`` carries commands from
the writer thread to the training thread and the answers back; ``policy`` knows when to refuse.
"""
