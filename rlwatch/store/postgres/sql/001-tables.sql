-- The run: one row, the catalogue. writer: who may write it; writes: how many transactions of that writer are in;
-- last_*: of the newest record by seq; judged_seq: findings, forecasts and alerts up to it are written.
CREATE TABLE run (
    run_id text PRIMARY KEY, project text NOT NULL, name text NOT NULL, source text NOT NULL,
    created_at double precision, config text NOT NULL, tags text NOT NULL, attempt bigint NOT NULL,
    state text NOT NULL, state_reason text NOT NULL, heartbeat_at double precision, host text NOT NULL, pid bigint,
    last_seq bigint NOT NULL DEFAULT 0, last_step bigint, last_ts double precision,
    last_attempt bigint NOT NULL DEFAULT 0, judged_seq bigint NOT NULL DEFAULT 0,
    writer text NOT NULL DEFAULT '', writes bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 60);
CREATE INDEX run_by_age ON run (created_at DESC, run_id DESC);

-- One row per process start; first_seq is the first number it may have written.
CREATE TABLE attempt (
    run_id text NOT NULL, attempt bigint NOT NULL, started_at double precision, first_seq bigint NOT NULL,
    host text NOT NULL, pid bigint, config text NOT NULL, PRIMARY KEY (run_id, attempt));

-- Which metrics a record holds: a JSON list of names, in the order of the packed values.
CREATE TABLE metric_set (run_id text NOT NULL, id integer NOT NULL, names text NOT NULL, PRIMARY KEY (run_id, id));

-- v: little-endian float64 values, one for each name of the metric set.
CREATE TABLE record (
    run_id text NOT NULL, seq bigint NOT NULL, attempt bigint NOT NULL, rank bigint NOT NULL, step bigint NOT NULL,
    ts double precision, mset integer NOT NULL, v bytea NOT NULL, PRIMARY KEY (run_id, seq));
CREATE INDEX record_by_set ON record (run_id, mset, seq);
ALTER TABLE record ALTER v SET STORAGE EXTERNAL;

-- seq is of the same space as record.seq. JSON is text: jsonb has no NaN and reorders.
CREATE TABLE event (
    run_id text NOT NULL, seq bigint NOT NULL, attempt bigint NOT NULL, step bigint, ts double precision,
    kind text NOT NULL, body text NOT NULL, PRIMARY KEY (run_id, seq));

-- body: JSON of message, evidence, metric, family, score, baseline (numbers that may be NaN), stage.
CREATE TABLE finding (
    run_id text NOT NULL, id bigint NOT NULL, seq bigint NOT NULL, attempt bigint NOT NULL, step bigint NOT NULL,
    onset_step bigint NOT NULL, detector text NOT NULL, kind text NOT NULL, severity text NOT NULL,
    body text NOT NULL, PRIMARY KEY (run_id, id));

-- What was forecast at the step of the record seq: packed as in record; body: JSON of what is no number.
CREATE TABLE forecast (
    run_id text NOT NULL, seq bigint NOT NULL, attempt bigint NOT NULL, step bigint NOT NULL, ts double precision,
    mset integer NOT NULL, v bytea NOT NULL, body text NOT NULL, PRIMARY KEY (run_id, seq));
CREATE INDEX forecast_by_set ON forecast (run_id, mset, seq);
ALTER TABLE forecast ALTER v SET STORAGE EXTERNAL;

-- v: all n rows of the batch by column, compressed already (rlwatch/store/sqlite/rows.py).
CREATE TABLE spike_batch (
    run_id text NOT NULL, id bigint NOT NULL, step bigint NOT NULL, attempt bigint NOT NULL, rank bigint NOT NULL,
    ts double precision, reason text NOT NULL, n bigint NOT NULL, v bytea NOT NULL, PRIMARY KEY (run_id, id));
ALTER TABLE spike_batch ALTER v SET STORAGE EXTERNAL;
CREATE INDEX spike_batch_by_step ON spike_batch (run_id, step);

-- The worst rows of each batch; body: JSON of the row.
CREATE TABLE spike_top (
    run_id text NOT NULL, id bigint NOT NULL, batch bigint NOT NULL, score double precision NOT NULL,
    step bigint NOT NULL, attempt bigint NOT NULL, rank bigint NOT NULL, body text NOT NULL, PRIMARY KEY (run_id, id));
CREATE INDEX spike_top_by_score ON spike_top (run_id, score DESC, id);

CREATE TABLE completion_batch (
    run_id text NOT NULL, id bigint NOT NULL, step bigint NOT NULL, attempt bigint NOT NULL, rank bigint NOT NULL,
    ts double precision, n bigint NOT NULL, v bytea NOT NULL, PRIMARY KEY (run_id, id));
ALTER TABLE completion_batch ALTER v SET STORAGE EXTERNAL;

-- What of a trainer's journal is stored: all up to upto, and the numbers in above (JSON list).
CREATE TABLE journal (
    run_id text NOT NULL, nonce text NOT NULL, upto bigint NOT NULL, above text NOT NULL, PRIMARY KEY (run_id, nonce));

-- What the judge knew after the record or event seq; body is a sealed pickle, opened by the user who made it only.
CREATE TABLE checkpoint (
    run_id text NOT NULL, seq bigint NOT NULL, attempt bigint NOT NULL, step bigint NOT NULL, made_by text NOT NULL,
    body bytea NOT NULL, PRIMARY KEY (run_id, seq));
ALTER TABLE checkpoint ALTER body SET STORAGE EXTERNAL;

CREATE TABLE command (
    run_id text NOT NULL, id bigserial, command_id text NOT NULL, kind text NOT NULL, args text NOT NULL,
    force boolean NOT NULL, status text NOT NULL, requested_by text NOT NULL, why text NOT NULL,
    idempotency_key text NOT NULL, created_at double precision, expires_at double precision,
    claimed_at double precision, finished_at double precision, finished_step bigint, result text NOT NULL,
    PRIMARY KEY (run_id, id), UNIQUE (run_id, command_id));
CREATE UNIQUE INDEX command_once ON command (run_id, idempotency_key) WHERE idempotency_key <> '';
CREATE INDEX command_open ON command (run_id, status) WHERE status IN ('queued', 'claimed', 'cancelling');

-- seen_at: when the alert was first stored.
CREATE TABLE alert (
    run_id text NOT NULL, id bigserial, alert_id text NOT NULL, seen_at double precision NOT NULL, rule text NOT NULL,
    kind text NOT NULL, severity text NOT NULL, state text NOT NULL, onset_step bigint NOT NULL, step bigint NOT NULL,
    message text NOT NULL, reason text NOT NULL, detector text NOT NULL, evidence text NOT NULL,
    fired_at double precision, resolved_step bigint, resolved_at double precision,
    PRIMARY KEY (run_id, id), UNIQUE (run_id, alert_id));

-- leased_by: the process that holds the message; touched_at: when it was last leased. A time to come means that a
-- clock was set back since.
CREATE TABLE outbox (
    run_id text NOT NULL, id bigserial, message_id text NOT NULL, alert_id text NOT NULL, channel text NOT NULL,
    payload text NOT NULL, status text NOT NULL, attempts bigint NOT NULL, next_attempt_at double precision NOT NULL,
    lease_until double precision NOT NULL, last_error text NOT NULL, created_at double precision,
    sent_at double precision, leased_by text NOT NULL DEFAULT '', touched_at double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, id), UNIQUE (run_id, message_id));
CREATE INDEX outbox_pending ON outbox (next_attempt_at) WHERE status = 'pending';

CREATE TABLE acknowledgement (
    run_id text NOT NULL, id bigserial, alert_id text NOT NULL, acknowledged_by text NOT NULL, why text NOT NULL,
    at double precision NOT NULL, severity text NOT NULL, PRIMARY KEY (run_id, alert_id));

-- How often alerts, messages or acknowledgements of the run were written: a composer checks that no other process wrote.
CREATE TABLE alert_book (run_id text PRIMARY KEY, revision bigint NOT NULL);

-- What people changed about the run, oldest first; body: JSON of the fields of a RunEdit that were given.
CREATE TABLE edit (
    run_id text NOT NULL, id bigserial, edited_by text NOT NULL, at double precision NOT NULL, body text NOT NULL,
    PRIMARY KEY (run_id, id));

-- Runs that were removed for good.
CREATE TABLE purge (
    id bigserial PRIMARY KEY, run_id text NOT NULL, project text NOT NULL, name text NOT NULL, purged_by text NOT NULL,
    at double precision NOT NULL, deleted_by text NOT NULL, deleted_at double precision NOT NULL);

-- Of the whole store. labels: JSON, text to text.
CREATE TABLE silence (
    id bigserial PRIMARY KEY, silence_id text NOT NULL UNIQUE, silenced_by text NOT NULL, why text NOT NULL,
    created_at double precision NOT NULL, until double precision NOT NULL, run text NOT NULL, project text NOT NULL,
    kind text NOT NULL, rule text NOT NULL, labels text NOT NULL);

-- Which roles (their members, too) may see which project; '*' is all. It counts once roles.sql was run.
CREATE TABLE member (role_name text NOT NULL, project text NOT NULL, PRIMARY KEY (role_name, project));
