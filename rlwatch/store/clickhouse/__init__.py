"""The bulk of a team's runs in ClickHouse; the tables that control them are in PostgreSQL.

``postgresql://user@host/database?series=clickhouse://user@host:8123/database``. What is sent here carries the epoch of
its writer; PostgreSQL notes, in the transaction that stores everything else, how far each epoch counts
(:class:`rlwatch.store.postgres.carrier.Shipment`). So a write counts in both or in neither, and a row that is sent
twice is there once (``ReplacingMergeTree``, read with ``FINAL``).
"""
