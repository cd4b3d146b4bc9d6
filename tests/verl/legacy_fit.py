"""verl's own ``run_ppo`` and ``RayPPOTrainer.fit``, of any verl from 0.5 on, with stand-ins for its worker groups.

    python -m rlwatch.integrations.verl tests/verl/legacy_fit.py STORE [--steps N] [--break]

Real: the process that starts Ray, Ray's runtime environment, the ``TaskRunner`` actor, the loop, advantages, metrics
and ``Tracking``. Not real: what generates, and what updates (they need GPUs in these versions).
"""

import argparse
import inspect
import sys

STEPS, BATCH, N, PROMPT, RESPONSE = 3, 4, 2, 4, 6


def composed(store, steps):
    """verl's configuration, as its command line would make it."""
    from hydra import compose, initialize_config_module

    overrides = [
        "trainer.logger=[console,rlwatch]", f"+trainer.rlwatch.store={store}", "+trainer.rlwatch.run_id=legacy",
        "trainer.project_name=math", "trainer.experiment_name=seed3", f"trainer.total_training_steps={steps}",
        "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.device=cpu", "trainer.val_before_train=False",
        "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.resume_mode=disable", "trainer.balance_batch=False",
        "trainer.total_epochs=9", "algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.n={N}",
        f"data.train_batch_size={BATCH}", "data.dataloader_num_workers=0", "data.shuffle=False",
        "data.train_files=none", "data.val_files=none",
    ]  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def named_again():
    """verl 0.6 imports a class that transformers 5 has under another name only; it is not used here."""
    import transformers

    if not hasattr(transformers, "AutoModelForVision2Seq"):
        transformers.AutoModelForVision2Seq = transformers.AutoModelForImageTextToText


def trainer_class(breaks):  # noqa: C901  (classes that only exist once verl is imported)
    """verl's trainer; only what asks worker groups is replaced."""
    from types import SimpleNamespace

    import torch

    named_again()
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Role

    class Group:
        """Stands for every worker group, rollout manager and checkpoint engine."""

        world_size = 1

        def generate_sequences(self, prompts):
            rows = len(prompts)
            ids = torch.randint(4, 16, (rows, PROMPT + RESPONSE))
            mask = torch.ones(rows, PROMPT + RESPONSE, dtype=torch.long)
            scores = torch.zeros(rows, RESPONSE)
            scores[:, -1] = torch.rand(rows)
            tensors = {
                "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "input_ids": ids, "attention_mask": mask,
                "position_ids": mask.cumsum(1) - 1, "response_mask": mask[:, PROMPT:], "rm_scores": scores,
            }  # fmt: skip
            return DataProto.from_dict(tensors, non_tensors=per_row(rows), meta_info={"timing": {}})

        def compute_log_prob(self, batch):
            shape = batch.batch["responses"].shape
            return DataProto.from_dict({"old_log_probs": -torch.rand(shape), "entropys": torch.rand(shape)})

        def update_actor(self, batch):
            if breaks:
                raise ValueError("the actor broke")
            return DataProto(meta_info={"metrics": {"actor/pg_loss": [0.5], "actor/grad_norm": [float("nan")]}})

        def __getattr__(self, name):
            return lambda *_args, **_kwargs: None

    class Prompts(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            said = {"raw_prompt": [{}], "index": i, "data_source": "digits", "reward_model": {"ground_truth": ""}}
            if hasattr(RayPPOTrainer, "_compute_old_log_prob"):  # from 0.7 on only the rollout tokenizes
                return {"dummy_tensor": torch.zeros(1, dtype=torch.uint8), **said}
            ids = torch.randint(4, 16, (PROMPT,))
            tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(PROMPT)}
            return {**tokens, "raw_prompt_ids": [1, 2], **said}

    class Trainer(RayPPOTrainer):
        def _validate_config(self):
            """Counts GPUs."""

        def _compute_old_log_prob(self, batch):
            return self.actor_rollout_wg.compute_log_prob(batch), 0.0

        def _update_actor(self, batch):
            return self.actor_rollout_wg.update_actor(batch)

    def per_row(rows):
        import numpy as np

        return {"multi_modal_inputs": np.array([{} for _ in range(rows)], dtype=object)}

    def make(config):
        from verl.utils.dataset.rl_dataset import collate_fn

        trainer = Trainer(
            config=config, tokenizer=None, role_worker_mapping={Role.ActorRollout: Group},
            resource_pool_manager=SimpleNamespace(get_n_gpus=lambda: 1),
            train_dataset=Prompts(), val_dataset=Prompts(), collate_fn=collate_fn,
            train_sampler=torch.utils.data.SequentialSampler(Prompts()),
        )  # fmt: skip
        group = trainer.actor_rollout_wg = trainer.async_rollout_manager = trainer.checkpoint_manager = Group()
        trainer.use_reference_policy = trainer.async_rollout_mode = False
        trainer.reward_fn = lambda batch, **_: {"reward_tensor": batch.batch["rm_scores"], "reward_extra_info": {}}
        trainer.reward_loop_manager = trainer.llm_server_manager = group
        return trainer

    return make


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--break", dest="breaks", action="store_true")
    args = parser.parse_args()

    named_again()
    import ray
    from omegaconf import open_dict
    from verl.trainer import main_ppo

    breaks, make = args.breaks, trainer_class

    class TaskRunner:
        def run(self, config):
            make(breaks)(config).fit()

    config = composed(args.store, args.steps)
    with open_dict(config):
        ray_init = config.get("ray_init") or config.ray_kwargs.ray_init
        ray_init.num_cpus = 4
    given = {}
    if "task_runner_class" in inspect.signature(main_ppo.run_ppo).parameters:
        given["task_runner_class"] = ray.remote(num_cpus=1)(TaskRunner)
    else:  # 0.5 knows one runner
        main_ppo.TaskRunner = ray.remote(num_cpus=1)(TaskRunner)
    main_ppo.run_ppo(config, **given)


if __name__ == "__main__":
    sys.exit(main())
