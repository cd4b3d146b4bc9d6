-- Values of n rows of a metric set by column, copies of what record holds: a row a metric, place: where in the set.
CREATE TABLE chunk (
    run_id text NOT NULL, mset integer NOT NULL, place integer NOT NULL, first_seq bigint NOT NULL, v bytea NOT NULL,
    PRIMARY KEY (run_id, mset, place, first_seq));
ALTER TABLE chunk ALTER v SET STORAGE EXTERNAL;

-- Their axes: little-endian int64, or first and stride alone (rlwatch/store/sqlite/blocks.py).
CREATE TABLE chunk_axis (
    run_id text NOT NULL, mset integer NOT NULL, first_seq bigint NOT NULL, last_seq bigint NOT NULL, n integer NOT NULL,
    low_step bigint NOT NULL, high_step bigint NOT NULL, seqs bytea NOT NULL, steps bytea NOT NULL,
    attempts bytea NOT NULL, PRIMARY KEY (run_id, mset, first_seq));
