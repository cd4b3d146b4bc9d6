-- Spreads the store over the workers of a Citus cluster. Run by the owner of the tables on the coordinator, while no run
-- is written. {schema} stands for the schema. All rows of a run lie together, so that every query that names a run goes to
-- one shard; over all runs go the catalogue (runs, their edits) and lists of alerts, acknowledgements and messages.
-- Locks and LISTEN are the coordinator's: trainers connect to it, or to a pool in session mode before it.
SELECT create_distributed_table('{schema}.run', 'run_id');
SELECT create_distributed_table('{schema}.' || name, 'run_id', colocate_with => '{schema}.run')
    FROM unnest(ARRAY['attempt', 'metric_set', 'record', 'event', 'finding', 'forecast', 'spike_batch', 'spike_top',
        'completion_batch', 'chunk', 'chunk_axis', 'series_epoch', 'journal', 'checkpoint', 'command', 'alert',
        'outbox', 'acknowledgement', 'alert_book', 'forecast_answer', 'edit']) AS name;
SELECT create_reference_table('{schema}.' || name)
    FROM unnest(ARRAY['schema_version', 'series_place', 'silence', 'audit', 'purge', 'member']) AS name;
