"""Rollouts on a CPU, sampled from the actor's weights in the driver's process, in place of an LLM server.

verl finds this as ``rollout.agent.agent_loop_manager_class``. Beside sampling it plays the person who watches: at
the steps given by ``--command`` it asks something of the run, as ``rlwatch command`` or the dashboard would.
"""

import json
import os
import time

import torch
import transfer_queue as tq
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl_cpu import WEIGHTS

from rlwatch.control.commands import request
from rlwatch.records import CommandStatus
from rlwatch.store.url import open_store

COMMANDS = "VERL_CPU_COMMANDS"


class CpuRollouts:
    def __init__(self, config):
        self.config = config
        path = config.actor_rollout_ref.model.path
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.person = Person(config, json.loads(os.environ.get(COMMANDS, "[]")))

    @classmethod
    def create(cls, config, **_):
        return cls(config)

    @torch.no_grad()
    def generate_sequences(self, batch):
        """One group of responses for each prompt, into the TransferQueue."""
        step = int(batch["global_steps"])
        self.person.comes_by(step)
        self.model.load_state_dict(torch.load(os.environ[WEIGHTS]), strict=False)
        drawn = torch.Generator().manual_seed(step)  # of its own: the same responses however often it is run
        keys, fields, tags = [], [], []
        for row, (uid, asked) in enumerate(zip(batch["uid"], batch["raw_prompt"], strict=True)):
            messages = getattr(asked, "data", asked)
            prompt = torch.tensor(self.tokenizer.apply_chat_template(messages, return_dict=False))
            for session in range(self.config.actor_rollout_ref.rollout.n):
                response, logps = self.sample(prompt, drawn)
                keys.append(f"{uid}_{session}_0")
                fields.append(self.fields(uid, row, prompt, response, logps))
                tags.append(self.tags(step, prompt, response))
            done = {"is_prompt": True, "status": "finished", "global_steps": step}
            tq.kv_put(key=uid, partition_id="train", tag=done)
        tq.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train")

    def sample(self, prompt, drawn):
        ids, logps = prompt[None], []
        settings = self.config.actor_rollout_ref.rollout
        for _ in range(settings.response_length):
            logp = (self.model(input_ids=ids).logits[0, -1] / settings.temperature).log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1, generator=drawn)
            logps.append(float(logp[token]))
            ids = torch.cat([ids, token[None]], 1)
            if int(token) == self.tokenizer.eos_token_id:
                break
        return ids[0, len(prompt) :], torch.tensor(logps)

    def fields(self, uid, row, prompt, response, logps):
        whole, on = torch.cat([prompt, response]), torch.ones_like(response)
        scores = torch.zeros(len(response))
        scores[-1] = float((response % 2 == 0).float().mean())  # the task: even tokens
        return {
            "uid": uid, "prompts": prompt, "responses": response, "response_mask": on, "loss_mask": on,
            "input_ids": whole, "position_ids": torch.arange(len(whole)), "rollout_log_probs": logps,
            "rm_scores": scores, "data_source": "odd rows" if row % 2 else "even rows", "num_turns": 2,
            "multi_modal_inputs": {}, "extra_fields": {}, "reward_model": {"ground_truth": ""},
        }  # fmt: skip

    def tags(self, step, prompt, response):
        return {
            "status": "success", "prompt_len": len(prompt), "response_len": len(response),
            "seq_len": len(prompt) + len(response), "global_steps": step,
            "min_global_steps": step - 1, "max_global_steps": step - 1,
        }  # fmt: skip


class Person:
    """Sends each command while its step generates, and waits until the trainer has it."""

    def __init__(self, config, plan):
        self.plan = plan
        self.settings = config.trainer.get("rlwatch", {})

    def comes_by(self, step):
        for planned in [command for command in self.plan if command["at"] == step]:
            store = open_store(self.settings["store"])
            run_id = self.settings["run_id"]
            sent = request(store, run_id, planned["kind"], args=planned["args"], why="the example asks for it")
            while any(c.command_id == sent.command_id for c in store.commands(run_id, CommandStatus.QUEUED)):
                time.sleep(0.05)
            store.close()
