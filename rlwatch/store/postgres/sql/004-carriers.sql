-- Where rows, localised tokens and completions lie if not here: no row, or one that names another engine, without secrets.
CREATE TABLE series_place (one boolean PRIMARY KEY DEFAULT true CHECK (one), place text NOT NULL);

-- What of that counts. A writer sends under an epoch of its own, and begins another after whatever went wrong; rows of
-- an epoch count from first_seq to last_seq, batches of tokens and of completions up to these numbers.
CREATE TABLE series_epoch (
    run_id text NOT NULL, epoch bigint NOT NULL, first_seq bigint NOT NULL, last_seq bigint NOT NULL,
    spikes bigint NOT NULL, completions bigint NOT NULL, PRIMARY KEY (run_id, epoch));
