"""A team's store on PostgreSQL: ``postgresql://user@host/database?sslmode=verify-full&schema=team``.

A trainer keeps what it logs in a journal on its own disk and ships it in batches (binary COPY). Each batch is one
transaction, which also records how far the journal is stored. The trainer's right to write the run is a session lock of
the server. Every write also names the writer, so that a writer that was cut off and replaced cannot continue.
"""
