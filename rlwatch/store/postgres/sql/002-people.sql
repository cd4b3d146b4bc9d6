-- alerts: JSON list of ids, [] for all; up_to: a severity, '' for all.
ALTER TABLE silence ADD COLUMN alerts text NOT NULL DEFAULT '[]', ADD COLUMN up_to text NOT NULL DEFAULT '';

-- Actions and annotations of people; rows are only added. run, alert: '' where the entry is about none.
CREATE TABLE audit (
    id bigserial PRIMARY KEY, entry_id text NOT NULL UNIQUE, at double precision NOT NULL, done_by text NOT NULL,
    act text NOT NULL, text text NOT NULL, run text NOT NULL, alert text NOT NULL);

-- Answers of people to forecasts.
CREATE TABLE forecast_answer (
    run_id text NOT NULL, attempt bigint NOT NULL, step bigint NOT NULL, is_right boolean NOT NULL,
    answered_by text NOT NULL, why text NOT NULL, at double precision NOT NULL, PRIMARY KEY (run_id, attempt, step));
