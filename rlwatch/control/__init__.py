"""Control of a live run: commands that users or policies queue in the store, and that the trainer executes.

``commands`` defines the kinds of command and queues them; ``mailbox`` passes them from the writer thread to the
training thread, and the results back; ``policy`` vetoes commands and permits automatic actions; ``rescue`` is the
policy that saves a failing run; ``liveness`` decides whether a run is alive.
"""
