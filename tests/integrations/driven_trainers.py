"""Stand-ins of trainers whose driver steers workers: SkyRL 0.3 and AReaL 1.0, with the methods and the order of calls of
their loops. ``tests/nightly/test_driven_names.py`` compares them with the packages.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch

PROMPT, RESPONSE = 3, 5


class Workers:
    """SkyRL's ``WorkerDispatch``: a number is the weights, and the schedule halves the rate every step."""

    def __init__(self):
        self.weights, self.updates, self.algorithm, self.lr, self.used = 0.0, 0, {}, 1.0, []
        self.sent = []

    def async_run_ray_method(self, _how, name):
        assert name == "get_lr"
        return [self.lr]

    def set_lr(self, model, learning_rate):
        self.lr = learning_rate

    def optim_step(self, model):
        self.used.append(self.lr)
        self.weights += 1.0
        self.updates += 1
        self.lr = 0.5**self.updates
        return 1.0

    def set_algorithm_config(self, model, **kwargs):
        self.algorithm.update(kwargs)

    def save_checkpoint(self, model, ckpt_dir):
        Path(ckpt_dir).mkdir(parents=True, exist_ok=True)
        Path(ckpt_dir, "w").write_text(str(self.weights))

    def load_checkpoint(self, model, ckpt_dir):
        self.weights = float(Path(ckpt_dir, "w").read_text())

    async def save_weights_for_sampler(self):
        self.sent.append(self.weights)


class Batch(dict):
    """SkyRL's ``TrainingInputBatch``: columns and metadata."""

    metadata: dict


def batch_of(step, pad=1):
    """Four responses of two prompts and a padding row; the fifth token of the first came from a tool."""
    generator = torch.Generator().manual_seed(step)
    n = 4 + pad
    mask = (torch.arange(RESPONSE) < torch.tensor([5, 4, 3, 5, 1])[:n, None]).long()
    loss_mask = mask.clone()
    loss_mask[0, 4] = 0
    logp = -torch.rand(n, RESPONSE, generator=generator)
    rewards = torch.zeros(n, RESPONSE)
    rewards[:4, 0] = torch.tensor([1.0, 0.0, 1.0, 1.0])
    data = Batch(
        sequences=torch.randint(0, 50, (n, PROMPT + RESPONSE), generator=generator),
        response_mask=mask,
        loss_mask=loss_mask,
        action_log_probs=logp,
        base_action_log_probs=logp - 0.1,
        rollout_logprobs=logp + 0.05,
        rewards=rewards,
        values=None,
    )
    data.metadata = {"uids": ["a", "a", "b", "b", "pad"][:n], "pad_size": pad, "avg_response_length": 4.0}
    return data


class Tracking:
    def __init__(self):
        self.rows = []

    def log(self, data, step, commit=False):
        self.rows.append((step, dict(data)))


class SkyRLTrainer:
    """The order of ``RayPPOTrainer.train``; ``fails`` at a step."""

    def __init__(self, where, steps=4, fails=None, **algorithm):
        settings = {"kl_loss_coef": 0.01, "use_kl_loss": True, "use_kl_in_reward": False, **algorithm}
        self.cfg = SimpleNamespace(
            trainer=SimpleNamespace(
                ckpt_path=str(where), project_name="math", run_name="sky", max_training_steps=None,
                max_ckpts_to_keep=-1, algorithm=SimpleNamespace(**settings),
            )
        )  # fmt: skip
        self.tracker, self.dispatch, self.callbacks = Tracking(), Workers(), []
        self.policy_model, self.ref_model, self.has_critic = self.dispatch, object(), False
        self.reward_kl_controller, self.resets = None, []
        self.global_step, self.steps, self.fails = 0, steps, fails
        self.control = SimpleNamespace(should_save=False, should_evaluate=False)

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def _fire(self, name, **fields):
        for one in self.callbacks:
            getattr(one, name)(self, SimpleNamespace(global_step=self.global_step, **fields), self.control)

    def compute_advantages_and_returns(self, data):
        data["advantages"] = torch.where(data["rewards"].sum(1, keepdim=True) > 0, 1.0, -1.0) * data["response_mask"]
        return data

    def save_checkpoints(self):
        place = f"{self.cfg.trainer.ckpt_path}/global_step_{self.global_step}"
        self.dispatch.save_checkpoint("policy", f"{place}/policy")
        return place

    def update_ref_with_policy(self):
        self.resets.append(self.global_step)

    async def train(self):
        self._fire("on_train_start")
        self.global_step += 1
        while self.global_step <= self.steps:
            self._fire("on_step_start")
            data = self.compute_advantages_and_returns(batch_of(self.global_step))
            data["advantages"] = data["advantages"] / 17  # SkyRL scales them for its loss
            if self.fails == self.global_step:
                raise RuntimeError("a worker died")
            self.dispatch.optim_step("policy")
            self._fire("on_step_end", batch=data, metrics={})
            save, self.control.should_save = self.control.should_save, False
            if save:
                self._fire("on_save", ckpt_path=self.save_checkpoints())
            await self.dispatch.save_weights_for_sampler()
            logs = {"reward/avg_raw_reward": 0.75, "policy/policy_lr": 1.0, "timing/step": 0.1}
            self._fire("on_log", logs=logs)
            self.tracker.log(logs, step=self.global_step, commit=True)
            self.global_step += 1
            limit = self.cfg.trainer.max_training_steps
            if limit is not None and self.global_step > limit:
                break
        self._fire("on_train_end")

    def run(self):
        with ThreadPoolExecutor(1) as pool:  # a browser's tests leave a loop in the main thread
            pool.submit(asyncio.run, self.train()).result()


class Schedule:
    """AReaL's ``EpochStepTimeFreqCtl`` that is never due."""

    def check(self, epochs, steps):
        return False


class ARealTrainer:
    """The order of AReaL's ``PPOTrainer.train`` in its single-controller mode."""

    def __init__(self, steps=4, fails=None):
        self.config = SimpleNamespace(
            total_train_steps=None,
            recover=SimpleNamespace(mode="on"),
            stats_logger=SimpleNamespace(experiment_name="gsm8k", trial_name="t1"),
        )
        self.stats_logger = SimpleNamespace(commit=self._commit)
        self.saver, self.recover_handler = SimpleNamespace(freq_ctl=Schedule()), SimpleNamespace(freq_ctl=Schedule())
        self.scheduler = object()
        self.committed, self.saved, self.recovers, self.steps, self.fails = [], [], [], steps, fails

    def _commit(self, epoch, step, global_step, data):
        self.committed.append(global_step)

    def _save_hf(self, epoch, epoch_step, global_step):
        if self.saver.freq_ctl.check(epochs=0, steps=1):
            self.saved.append(global_step)

    def _save_recover_checkpoint(self, epoch, epoch_step, global_step):
        if self.recover_handler.freq_ctl.check(epochs=0, steps=1):
            self.recovers.append(global_step)

    def train(self):
        for step in range(self.steps):
            if self.config.total_train_steps is not None and step >= self.config.total_train_steps:
                break
            if step == self.fails:
                raise RuntimeError("a worker died")
            self._save_hf(epoch=0, epoch_step=step, global_step=step)
            self._save_recover_checkpoint(epoch=0, epoch_step=step, global_step=step)
            row = {"ppo_actor/task_reward/avg": 0.5, "ppo_actor/update/entropy/avg": 1.0, "n__count": 3}
            self.stats_logger.commit(0, step, step, row)
