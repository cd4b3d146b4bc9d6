"""Hold the bulk of a team's runs in ClickHouse; the tables that control them are in PostgreSQL.

``postgresql://user@host/database?series=clickhouse://user@host:8123/database``. Data sent to ClickHouse carry the epoch
of their writer. PostgreSQL records how far each epoch counts, in the transaction that stores everything else
(:class:`rlwatch.store.postgres.carrier.Shipment`). So a write counts in both or in neither, and a row that is sent
twice is stored once (``ReplacingMergeTree``, read with ``FINAL``).
"""
