"""Stands in for vLLM on a machine without a GPU: samples from a transformers model, on the CPU.

OpenRLHF asks ``torch.cuda`` for its device in every process, and imports vllm first in all of them: so what it asks
is answered here.
"""

import asyncio
import collections
import types
import zlib

import torch
from torch.distributed import device_mesh

__version__ = "0.29.0"


class Device(str):
    """The CPU, even where OpenRLHF puts a number behind ``cuda:``."""

    def __format__(self, _spec):
        return "0"


for _name in ("set_device", "synchronize", "empty_cache", "current_stream"):
    setattr(torch.cuda, _name, lambda *_: None)  # one function each: torch.compile tells them apart
torch.cuda.current_device = lambda: Device("cpu")
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(uuid="cpu")
torch.set_num_threads(1)

_init_device_mesh = device_mesh.init_device_mesh
device_mesh.init_device_mesh = lambda _device, *args, **kwargs: _init_device_mesh("cpu", *args, **kwargs)


class SamplingParams:
    """What OpenRLHF sets."""

    def __init__(self, **settings):
        self.__dict__.update(settings)


class AsyncEngineArgs:
    """Of which only the model counts."""

    def __init__(self, *, model, seed=0, **_):
        self.model, self.seed = model, seed


class AsyncLLMEngine:
    """One sampled continuation at a time, by the weights the model has on disk."""

    def __init__(self, args):
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        self._seed, self._asked = args.seed, collections.Counter()
        self.output_processor = types.SimpleNamespace(get_num_unfinished_requests=lambda: 0)

    @classmethod
    def from_engine_args(cls, args):
        return cls(args)

    async def is_sleeping(self):
        return False

    async def collective_rpc(self, *_args, **_kwargs):
        """New weights are not taken: the samples grow stale, which mismatch metrics show."""
        await asyncio.sleep(0)

    def _seed_of(self, ids):
        """The n-th continuation of a prompt is the same in every training, whatever came between."""
        key = ",".join(map(str, ids))
        self._asked[key] += 1
        return zlib.crc32(f"{self._seed} {key} {self._asked[key]}".encode())

    @torch.no_grad()
    async def generate(self, prompt, sampling, request_id):  # noqa: ARG002
        ids, logprobs = list(prompt["prompt_token_ids"]), []
        generator = torch.Generator().manual_seed(self._seed_of(ids))
        end = self._model.config.eos_token_id
        for _ in range(sampling.max_tokens):
            logits = self._model(torch.tensor([ids])).logits[0, -1].float() / sampling.temperature
            logp = torch.log_softmax(logits, -1)
            token = int(torch.multinomial(logp.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append({token: types.SimpleNamespace(logprob=float(logp[token]))})
            if token == end:
                break
        sampled = ids[len(prompt["prompt_token_ids"]) :]
        reason = "stop" if sampled and sampled[-1] == end else "length"
        output = types.SimpleNamespace(token_ids=sampled, text="", finish_reason=reason, logprobs=logprobs)
        yield types.SimpleNamespace(outputs=[output])
