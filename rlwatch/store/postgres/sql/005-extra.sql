-- extra: JSON object of the fields of a record that have no column here, '' where there are none (rlwatch/store/fields.py).
ALTER TABLE run ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE record ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE event ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE forecast ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE command ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE alert ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE outbox ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE acknowledgement ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE forecast_answer ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE silence ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE audit ADD COLUMN extra text NOT NULL DEFAULT '';
ALTER TABLE purge ADD COLUMN extra text NOT NULL DEFAULT '';

-- extra: number of rows sent under the epoch that have such fields, which lie in a table of their own.
ALTER TABLE series_epoch ADD COLUMN extra bigint NOT NULL DEFAULT 0;
