# ruff: noqa: E501  (one row of the table is one line or two)
"""Table rows of metrics of the machine that a run uses (``system/``), and of its rollout engines (``engine/``)."""

from __future__ import annotations

from rlwatch.metrics.rows import Family, Metric, fraction, same

# fmt: off

_SAMPLES = "mean since the row before"

MACHINE: tuple[Metric, ...] = (
    fraction("system/cpu/util", Family.SYSTEM, "share of the machine's processors that are busy", aggregator=_SAMPLES, panel=3),
    Metric("system/cpu/process", Family.SYSTEM, "cores", "processors that the training process keeps busy", 0.0, aggregator=_SAMPLES),
    fraction("system/memory/util", Family.SYSTEM, "share of the memory (of the container, where that has less) that is taken and cannot be freed", aggregator=_SAMPLES, panel=4),
    Metric("system/memory/free", Family.SYSTEM, "GiB", "memory that can still be had", 0.0, aggregator=_SAMPLES),
    Metric("system/memory/process", Family.SYSTEM, "GiB", "memory of the training process", 0.0, aggregator=_SAMPLES),
    Metric("system/disk/store/free", Family.SYSTEM, "GiB", "free space where the store lies", 0.0, aggregator=_SAMPLES),
    fraction("system/disk/store/util", Family.SYSTEM, "share of the disk of the store that is used", aggregator=_SAMPLES),
    Metric("system/disk/checkpoints/free", Family.SYSTEM, "GiB", "free space where checkpoints are written", 0.0, aggregator=_SAMPLES, aliases=(
        same("system/ckpt_disk_free_gib", "prime-rl"),), panel=5),
    fraction("system/disk/checkpoints/util", Family.SYSTEM, "share of the disk of the checkpoints that is used", aggregator=_SAMPLES),
    Metric("system/disk/read", Family.SYSTEM, "MiB/s", "read from all disks of the machine", 0.0, aggregator=_SAMPLES),
    Metric("system/disk/write", Family.SYSTEM, "MiB/s", "written to all disks of the machine", 0.0, aggregator=_SAMPLES),
    Metric("system/net/received", Family.SYSTEM, "MiB/s", "received over all networks of the machine", 0.0, aggregator=_SAMPLES),
    Metric("system/net/sent", Family.SYSTEM, "MiB/s", "sent over all networks of the machine", 0.0, aggregator=_SAMPLES),
)
OPEN_MACHINE: tuple[Metric, ...] = (
    Metric("system/gpu/", Family.SYSTEM, "", "of the GPU of that number: `/util` and `/memory` (shares), `/memory_used` (GiB), `/temperature` (°C), `/power` (W), `/throttled` (share of looks at which heat or the power supply held its clock back), `/power_capped` (at which its power limit did)", aggregator=_SAMPLES),
    Metric("system/rank/", Family.SYSTEM, "", "of another rank, by its number: what is measured of rank 0 without it, as `system/rank/3/gpu/0/util`", aggregator=_SAMPLES),
    Metric("time/stage/", Family.SYSTEM, "s", "time in one stage of a step, without the stages within it: `sampling`, `reward`, `logprobs`, `update`, `weight_sync`, `checkpoint`, `evaluation`, or a word of the loop's own", 0.0),
    Metric("time/rank/", Family.SYSTEM, "s", "time that one rank took for its own part of a step, before it waited for the others", 0.0),
)

ENGINE: tuple[Metric, ...] = (
    Metric("engine/running", Family.ENGINE, "requests", "requests that the rollout engines work on", 0.0, aggregator="sum of the engines", aliases=(
        same("inference/agg/num_requests_running/mean", "prime-rl"),), panel=1),
    Metric("engine/waiting", Family.ENGINE, "requests", "requests that wait in the engines' queues", 0.0, aggregator="sum of the engines", aliases=(
        same("inference/agg/num_requests_waiting/mean", "prime-rl"),), panel=2),
    fraction("engine/kv_cache", Family.ENGINE, "share of the engines' KV cache in use; at 1 requests are preempted", aggregator="mean of the engines", aliases=(
        same("inference/agg/kv_cache_usage_perc/mean", "prime-rl"),), panel=3),
    Metric("engine/throughput", Family.ENGINE, "tokens/s", "tokens that the engines generate", 0.0, aggregator="sum of the engines", panel=4),
    Metric("engine/prompt_throughput", Family.ENGINE, "tokens/s", "prompt tokens that the engines take in", 0.0, aggregator="sum of the engines"),
    Metric("engine/preemptions", Family.ENGINE, "1/s", "requests set back because the KV cache was full: their work is done again", 0.0, aggregator="sum of the engines", panel=5),
    fraction("engine/prefix_hits", Family.ENGINE, "prompt tokens found in the prefix cache", aggregator="of the tokens since the look before", aliases=(
        same("inference/agg/prefix_cache_hit_rate/pooled", "prime-rl"),)),
    fraction("engine/spec_accepted", Family.ENGINE, "drafted tokens of speculative decoding that were accepted; it falls as the policy leaves its draft", aggregator="of the tokens since the look before"),
    Metric("engine/failed", Family.ENGINE, "1/s", "requests that were aborted or ended in an error", 0.0, aggregator="sum of the engines"),
    Metric("engine/rollout_failures", Family.ENGINE, "samples", "rollouts left out because they failed", 0.0, aggregator="sum", aliases=(
        same("training/rollout_failure/evicted_samples", "verl"),)),
    Metric("engine/weight_sync", Family.ENGINE, "s", "time in which new weights went to the engines", 0.0, aggregator="sum", aliases=(
        same("perf/weight_sync_s", "trl"), same("time/broadcast_weights", "prime-rl"))),
    Metric("engine/down", Family.ENGINE, "engines", "engines that did not answer", 0.0, aggregator="sum of the engines"),
)
