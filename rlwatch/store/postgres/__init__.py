"""A team's store on PostgreSQL: ``postgresql://user@host/database?sslmode=verify-full&schema=team``.

A trainer keeps what it logs in a journal on its own disk and ships it in batches (binary COPY), each in one transaction
with how far the journal is stored. Its right to write the run is a session lock of the server; every write also names
the writer, so that one that was cut off and replaced cannot go on.
"""
