#!/usr/bin/env bash
# GRPO on GSM8K with verl 0.9, watched by rlwatch. Eight GPUs; every line can be overridden: ./launch.sh trainer.nnodes=2
# The last block is all that rlwatch needs, and its first line is enough.
set -euo pipefail

data=${DATA:-$HOME/data/gsm8k}          # train.parquet and test.parquet, as verl's examples/data_preprocess makes them
model=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
store=${STORE:-$PWD/rlwatch-runs}       # a directory all drivers reach, or postgresql://...

exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    trainer.project_name=math \
    trainer.experiment_name=gsm8k-3b \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.save_freq=50 \
    trainer.total_epochs=15 \
    trainer.logger='["console","rlwatch"]' \
    +trainer.rlwatch.store="$store" \
    "$@"
