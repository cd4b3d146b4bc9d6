-- Rows as they were logged; v: one value for each name of the metric set, whose names PostgreSQL has. {name} stands for
-- the store's schema. epoch: of the writer that sent the row; of rows that are sent twice the one of the later epoch stays.
CREATE TABLE IF NOT EXISTS {name}_record (
    run_id LowCardinality(String), seq Int64 CODEC(Delta, ZSTD(1)), epoch UInt64 CODEC(ZSTD(1)),
    attempt Int64 CODEC(ZSTD(1)), rank Int64 CODEC(ZSTD(1)), step Int64 CODEC(Delta, ZSTD(1)),
    ts Float64 CODEC(ZSTD(1)), mset Int32 CODEC(ZSTD(1)), v Array(Float64) CODEC(ZSTD(1)),
    at DateTime CODEC(Delta, ZSTD(1))
) ENGINE = ReplacingMergeTree(epoch) ORDER BY (run_id, seq);

-- The same by metric: a chart reads what it shows.
CREATE TABLE IF NOT EXISTS {name}_point (
    run_id LowCardinality(String), metric LowCardinality(String), seq Int64 CODEC(Delta, ZSTD(1)),
    epoch UInt64 CODEC(ZSTD(1)), attempt Int64 CODEC(ZSTD(1)), step Int64 CODEC(Delta, ZSTD(1)),
    value Float64 CODEC(ZSTD(1)), at DateTime CODEC(Delta, ZSTD(1))
) ENGINE = ReplacingMergeTree(epoch) ORDER BY (run_id, metric, seq);

-- The newest value of each metric: a list of runs scans no series. last: of (epoch, seq, step, value) by (epoch, seq).
CREATE TABLE IF NOT EXISTS {name}_latest (
    run_id LowCardinality(String), metric LowCardinality(String),
    last AggregateFunction(argMax, Tuple(UInt64, Int64, Int64, Float64), Tuple(UInt64, Int64)),
    at SimpleAggregateFunction(max, DateTime)
) ENGINE = AggregatingMergeTree ORDER BY (run_id, metric);

-- What writers insert into: keeps nothing, and feeds the three above in one insert.
CREATE TABLE IF NOT EXISTS {name}_row (
    run_id String, seq Int64, epoch UInt64, attempt Int64, rank Int64, step Int64, ts Float64, mset Int32,
    names Array(LowCardinality(String)), v Array(Float64)
) ENGINE = Null;
CREATE MATERIALIZED VIEW IF NOT EXISTS {name}_to_record TO {name}_record AS
    SELECT run_id, seq, epoch, attempt, rank, step, ts, mset, v, now() AS at FROM {name}_row;
CREATE MATERIALIZED VIEW IF NOT EXISTS {name}_to_point TO {name}_point AS
    SELECT run_id, metric, seq, epoch, attempt, step, value, now() AS at
    FROM {name}_row ARRAY JOIN names AS metric, v AS value;
CREATE MATERIALIZED VIEW IF NOT EXISTS {name}_to_latest TO {name}_latest AS
    SELECT run_id, metric, argMaxState((epoch, seq, step, value), (epoch, seq)) AS last, max(now()) AS at
    FROM {name}_row ARRAY JOIN names AS metric, v AS value GROUP BY run_id, metric;

-- Localised tokens: v holds all n rows of the batch by column, compressed already (rlwatch/store/sqlite/rows.py); scores
-- and bodies are those of its worst rows.
CREATE TABLE IF NOT EXISTS {name}_spike (
    run_id LowCardinality(String), epoch UInt64, number Int64, step Int64, attempt Int64, rank Int64, ts Float64,
    reason LowCardinality(String), n Int64, v String CODEC(NONE), scores Array(Float64),
    bodies Array(String) CODEC(ZSTD(1)), at DateTime DEFAULT now()
) ENGINE = ReplacingMergeTree ORDER BY (run_id, epoch, number);

CREATE TABLE IF NOT EXISTS {name}_completion (
    run_id LowCardinality(String), epoch UInt64, number Int64, step Int64, attempt Int64, rank Int64, ts Float64,
    n Int64, v String CODEC(NONE), at DateTime DEFAULT now()
) ENGINE = ReplacingMergeTree ORDER BY (run_id, epoch, number);

-- Fields of rows that have no column, JSON; few rows have any. extra of PostgreSQL's series_epoch is set if one has.
CREATE TABLE IF NOT EXISTS {name}_extra (
    run_id LowCardinality(String), seq Int64, epoch UInt64, body String CODEC(ZSTD(1)), at DateTime DEFAULT now()
) ENGINE = ReplacingMergeTree(epoch) ORDER BY (run_id, seq);
