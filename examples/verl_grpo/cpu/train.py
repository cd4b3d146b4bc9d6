"""Train a tiny policy with verl's v1 trainer on a CPU, watched by rlwatch.

    python examples/verl_grpo/cpu/train.py --steps 4 --command 2:reset-reference

Needs the extra ``verl`` (not in one environment with TRL 1.x). Two worker processes with ``--workers 2``.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
THREADS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
PROMPTS, BATCH = 64, 4


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="rlwatch-runs", help="where the run is recorded")
    parser.add_argument("--run-id", default="verl-on-cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--work", help="directory for the model, the data and the checkpoints")
    parser.add_argument("--command", action="append", default=[], help="STEP:KIND[:NAME=VALUE...], sent at that step")
    parser.add_argument("overrides", nargs="*", help="of verl's configuration, as on its own command line")
    return parser.parse_args()


def planned(text):
    step, kind, *args = text.split(":")
    return {"at": int(step), "kind": kind, "args": {k: number(v) for k, v in (a.split("=") for a in args)}}


def number(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def save_policy(path):
    """A random two-layer policy over digits, its character tokenizer, and prompts."""
    import pandas as pd
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    characters = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789", "=", "?"]
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="left", **special)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(characters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    rng = random.Random(0)
    questions = ["".join(rng.choices("0123456789", k=3)) + "=" for _ in range(PROMPTS)]
    rows = [
        {"prompt": [{"role": "user", "content": q}], "data_source": "digits", "reward_model": {"ground_truth": ""}}
        for q in questions
    ]
    pd.DataFrame(rows).to_parquet(path / "prompts.parquet")


def configuration(work, args):
    """verl's own configuration, with what is different on a CPU."""
    from hydra import compose, initialize_config_module

    model, fp32 = work / "policy", "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    actor, ref, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
    overrides = [
        "trainer.logger=[console,rlwatch]",  # this is what switches rlwatch on; the next two are optional
        f"+trainer.rlwatch.store={Path(args.store).absolute()}",
        f"+trainer.rlwatch.run_id={args.run_id}",
        f"trainer.total_training_steps={args.steps}", f"trainer.n_gpus_per_node={args.workers}",
        "trainer.nnodes=1", "trainer.device=cpu", "trainer.val_before_train=False", "trainer.save_freq=-1",
        f"trainer.default_local_dir={work / 'checkpoints'}",
        "algorithm.adv_estimator=grpo", f"{actor}.use_kl_loss=True",
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2", f"{actor}.optim.lr=2e-3",
        f"{actor}.ppo_mini_batch_size={BATCH // 2}", f"{actor}.ppo_micro_batch_size_per_gpu=2",
        f"{ref}.log_prob_micro_batch_size_per_gpu=8", f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        *(f"{part}.use_torch_compile=False" for part in (actor, ref)),
        *(f"{part}.fsdp_config.use_torch_compile=False" for part in (actor, ref)),
        *(f"+{part}.fsdp_config.mixed_precision={fp32}" for part in (actor, ref)),
        f"{rollout}.name=cpu", f"{rollout}.n=4", f"{rollout}.tensor_model_parallel_size=1",
        f"+{rollout}.agent.agent_loop_manager_class=rollouts.CpuRollouts",
        f"data.train_files={model / 'prompts.parquet'}", f"data.val_files={model / 'prompts.parquet'}",
        "data.seed=0", f"data.train_batch_size={BATCH}", "data.max_prompt_length=16", "data.max_response_length=8",
        "data.dataloader_num_workers=0", "reward.num_workers=0",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        *args.overrides,
    ]  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def main():
    args = arguments()
    work = Path(args.work or tempfile.mkdtemp(prefix="verl-on-cpu-"))
    work.mkdir(parents=True, exist_ok=True)
    environment = {
        **THREADS,
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_CPU_WEIGHTS": str(work / "weights.pt"),
        "VERL_CPU_COMMANDS": json.dumps([planned(text) for text in args.command]),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    os.environ.update(environment)
    sys.path.insert(0, str(HERE))
    if not (work / "policy").exists():
        save_policy(work / "policy")

    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    config = configuration(work, args)
    ray.init(  # a cluster of its own; verl counts GPUs: let Ray count as many as there are workers
        address="local", num_cpus=8, num_gpus=args.workers, include_dashboard=False,
        object_store_memory=100 * 2**20, runtime_env={"env_vars": environment},
    )  # fmt: skip
    try:
        run_ppo(config, task_runner_class=TaskRunnerV1)
    finally:
        ray.shutdown()
    print(f"recorded as {args.run_id} in {args.store}: rlwatch show {args.run_id} --store {args.store}")


if __name__ == "__main__":
    main()
