"""The way back: from a person's command, as a row, to the live trainer.

``commands`` lists what can be asked and writes a person's wish down; ``mailbox`` carries commands from the writer
thread to the training thread and the answers back; ``policy`` knows when to refuse and what needs no person;
``liveness`` judges if a run goes on.
"""
