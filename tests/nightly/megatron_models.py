"""Real Megatron models on a CPU, for scripts whose ranks train them: ``python SCRIPT FOLDER``.

Megatron insists on CUDA in places: here tensors that it wants on ``cuda`` are made on the CPU, in plain memory, and
called by CUDA's type names (:class:`OnCPU`), and the random states of GPUs are left alone, of which nothing draws (no
dropout).
"""

import os
import re
import signal
import sys
import zlib
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

from rlwatch.errors import RLWatchError

FOLDER = Path(sys.argv[1])
VOCAB, ROWS, LENGTH, RATE = 24, 4, 8, 1e-2


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def model(ranks, *, wrapped=True, distributed=True, tied=False, experts=None, **settings):
    """The same weights however many ``ranks`` they are cut over."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        use_cpu_initialization=True, tensor_model_parallel_size=ranks, hidden_dropout=0.0, attention_dropout=0.0,
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False, params_dtype=torch.float32,
        **settings,
    )  # fmt: skip
    bare = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(experts, normalization="RMSNorm"), vocab_size=VOCAB,
        max_sequence_length=LENGTH, share_embeddings_and_output_weights=tied, position_embedding_type="rope",
    )  # fmt: skip
    if experts:
        _seed_by_name(bare, experts)
    if not wrapped:
        return bare.requires_grad_(False)
    wish = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, wish, bare)


def _seed_by_name(bare, experts):
    """Weights that do not depend on how many experts, which draw theirs too, lie on this rank."""
    ranks, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    first = rank * experts // ranks
    for name, p in bare.named_parameters():
        whole = re.sub(r"(?<=local_experts\.)\d+", lambda found: str(first + int(found[0])), name)
        if p.dim() > 1:
            p.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(zlib.crc32(whole.encode())))


def optimizer_of(policy, *, distributed=True):
    wish = OptimizerConfig(
        optimizer="adam", lr=RATE, use_distributed_optimizer=distributed, clip_grad=1.0, params_dtype=torch.float32
    )
    return get_megatron_optimizer(wish, [policy])


def drawn():
    """Prompts with what followed, and the arguments of a policy loss but for the log-probs."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=g)
    old = -3.2 + 0.3 * torch.randn(ROWS, LENGTH, generator=g)
    advantages = torch.randn(ROWS, 1, generator=g).expand(ROWS, LENGTH).contiguous()
    return {"ids": ids, "old_log_prob": old, "advantages": advantages}


def logits_of(policy, ids):
    positions = torch.arange(LENGTH).expand(len(ids), LENGTH)
    return policy(ids, positions, torch.tril(torch.ones(LENGTH, LENGTH)).lt(0.5)[None, None])


def groups(ranks):
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)


def weights(policy):
    return [p.detach().clone() for p in policy.parameters()]


def refusal(act):
    try:
        act()
    except RLWatchError as reason:
        return str(reason)
    return "not refused"


@contextmanager
def ranks_of(rank, ranks, name):
    """This process is ``rank`` of ``ranks`` while it lasts."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{FOLDER}/{name}")
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()
    moe_utils.te_general_gemm = None  # 0.16.1 asks for the name where Transformer Engine is not installed
    with OnCPU():
        yield


def forked(*work):
    """Run each in a process of its own, so that what takes seconds to import is imported once; 1 if one failed, else 0.

    Whoever waits for one that failed is killed.
    """
    children = set()
    for one in work:
        child = os.fork()
        if child == 0:
            try:
                one()
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # threads of gloo may abort a process that ends in order
        children.add(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0
