-- Three roles with what each needs and no more, and row-level security by project. Run by the owner of the tables, who
-- must be allowed to create roles (or create the three first); may be run again. {schema} stands for the schema.
--   {schema}_reader    looks at runs
--   {schema}_writer    records runs, raises their alerts, answers commands; cannot send one
--   {schema}_operator  looks, commands, acknowledges, silences, edits, delivers messages; cannot change what was measured
-- Afterwards:  CREATE ROLE ann LOGIN IN ROLE {schema}_operator;  INSERT INTO {schema}.member VALUES ('ann', 'math');
-- Purging runs is the owner's.
BEGIN;
SET LOCAL client_min_messages = warning;

DO $$
DECLARE each text;
BEGIN
    FOREACH each IN ARRAY ARRAY['{schema}_reader', '{schema}_writer', '{schema}_operator'] LOOP
        IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = each) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', each);
        END IF;
    END LOOP;
END $$;

REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {schema}_reader, {schema}_writer, {schema}_operator;
GRANT USAGE ON SCHEMA {schema} TO {schema}_reader, {schema}_writer, {schema}_operator;
GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {schema}_reader, {schema}_writer, {schema}_operator;

GRANT INSERT ON {schema}.attempt, {schema}.metric_set, {schema}.record, {schema}.event, {schema}.finding,
    {schema}.forecast, {schema}.spike_batch, {schema}.spike_top, {schema}.completion_batch,
    {schema}.chunk, {schema}.chunk_axis TO {schema}_writer;
GRANT INSERT, UPDATE ON {schema}.run, {schema}.journal, {schema}.alert, {schema}.outbox, {schema}.alert_book,
    {schema}.series_epoch TO {schema}_writer;
GRANT INSERT, UPDATE, DELETE ON {schema}.checkpoint TO {schema}_writer;
GRANT UPDATE (status, claimed_at, finished_at, finished_step, result) ON {schema}.command TO {schema}_writer;
GRANT USAGE ON SEQUENCE {schema}.alert_id_seq, {schema}.outbox_id_seq TO {schema}_writer, {schema}_operator;

GRANT INSERT ON {schema}.command, {schema}.edit TO {schema}_operator;
GRANT UPDATE (status, finished_at, result) ON {schema}.command TO {schema}_operator;
GRANT INSERT, UPDATE ON {schema}.alert, {schema}.outbox, {schema}.alert_book, {schema}.silence TO {schema}_operator;
GRANT INSERT, DELETE ON {schema}.acknowledgement TO {schema}_operator;
GRANT INSERT ON {schema}.audit TO {schema}_operator;
GRANT INSERT, UPDATE ON {schema}.forecast_answer TO {schema}_operator;
GRANT USAGE ON SEQUENCE {schema}.command_id_seq, {schema}.edit_id_seq, {schema}.silence_id_seq,
    {schema}.acknowledgement_id_seq, {schema}.audit_id_seq TO {schema}_operator;

-- Projects of whoever asks. A role that no row of member names sees nothing.
CREATE OR REPLACE FUNCTION {schema}.projects() RETURNS SETOF text LANGUAGE sql STABLE AS
    $$ SELECT m.project FROM {schema}.member AS m JOIN pg_catalog.pg_roles AS r ON r.rolname = m.role_name
       WHERE pg_catalog.pg_has_role(current_user, r.oid, 'member') $$;

DO $$
DECLARE each text;
BEGIN
    FOR each IN SELECT DISTINCT c.table_name FROM information_schema.columns AS c
        JOIN information_schema.tables AS t USING (table_schema, table_name)
        WHERE c.table_schema = '{schema}' AND c.column_name = 'run_id' AND t.table_type = 'BASE TABLE'
        AND c.table_name <> 'purge'
    LOOP
        EXECUTE format('ALTER TABLE {schema}.%I ENABLE ROW LEVEL SECURITY', each);
        EXECUTE format('DROP POLICY IF EXISTS of_project ON {schema}.%I', each);
        IF each = 'run' THEN
            CREATE POLICY of_project ON {schema}.run USING (
                project IN (SELECT {schema}.projects()) OR '*' IN (SELECT {schema}.projects()));
        ELSE
            EXECUTE format('CREATE POLICY of_project ON {schema}.%I USING (run_id IN (SELECT run_id FROM {schema}.run))',
                each);
        END IF;
    END LOOP;
END $$;

-- Acts of people that are about no run are everybody's.
ALTER TABLE {schema}.audit ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS of_project ON {schema}.audit;
CREATE POLICY of_project ON {schema}.audit USING (run = '' OR run IN (SELECT run_id FROM {schema}.run));

COMMIT;
