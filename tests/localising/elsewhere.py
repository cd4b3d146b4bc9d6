"""A device that no machine has: its tensors hold real numbers and refuse those of the CPU, as a GPU's do.

What mixes tensors of a GPU with tensors of the CPU fails on a GPU only, where no test of ours runs by itself. Within
``with elsewhere():`` tensors of the device "meta" are real: ``x.to("meta")`` copies there, ``x.cpu()`` back, and an
operation on tensors of both fails as on CUDA. What PyTorch does in C++ before it dispatches is not seen.
"""

from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

THERE = torch.device("meta")
_aten = torch.ops.aten
INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
MOVING = {_aten._to_copy.default, _aten.copy_.default}


class Elsewhere(torch.Tensor):
    """``here`` has the numbers, on the CPU."""

    is_meta = property(lambda _: False)

    @staticmethod
    def __new__(cls, here):
        return torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype, device=THERE
        )

    def __init__(self, here):
        self.here = here

    def __repr__(self):
        return f"Elsewhere({self.here})"

    def __getitem__(self, at):
        """Lists become indices in C++, on a device that has no numbers there: here, before."""

        def index(one):
            return torch.tensor(one, dtype=torch.int64 if not one else None) if isinstance(one, list) else one

        return super().__getitem__(tuple(map(index, at)) if isinstance(at, tuple) else index(at))

    def tolist(self):
        return self.here.tolist()

    def numpy(self, **_):
        raise TypeError("can't convert a tensor that is elsewhere to numpy. Use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    """Sees what makes tensors, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


def _call(func, args, kwargs):
    flat, spec = tree_flatten((args, kwargs))
    there = [x for x in flat if isinstance(x, Elsewhere)]
    device = kwargs.get("device")
    made_there = bool(there) if device is None else torch.device(device) == THERE
    _refuse_mixing(func, args, there, [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, Elsewhere)])
    here_args, here_kwargs = tree_unflatten([x.here if isinstance(x, Elsewhere) else x for x in flat], spec)
    if device is not None:
        here_kwargs = {**here_kwargs, "device": torch.device("cpu")}
    out = func(*here_args, **{**here_kwargs, **({"pin_memory": False} if kwargs.get("pin_memory") else {})})
    if func is _aten.copy_.default:
        return args[0]
    known = {id(x.here): x for x in there}

    def moved(x):
        if not isinstance(x, torch.Tensor) or not made_there:
            return x
        return known.get(id(x)) if id(x) in known else Elsewhere(x)

    out = tree_map(moved, out)
    return out if func in MOVING or not there else return_and_correct_aliasing(func, args, kwargs, out)


def _refuse_mixing(func, args, there, here):
    if func in INDEXING:
        if not isinstance(args[0], Elsewhere) and any(isinstance(one, Elsewhere) for one in args[1]):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        here = [x for x in args[2:3] if not isinstance(x, Elsewhere)]
    if there and func not in MOVING and any(x.dim() for x in here):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found two, in {func}")


@contextmanager
def elsewhere():
    """Within it there is the device."""
    before = torch.tensor, torch.as_tensor

    def making(make):
        def made(data, *args, device=None, **kwargs):
            x = make(data, *args, **kwargs)
            return x if device is None else x.to(device)

        return made

    torch.tensor, torch.as_tensor = map(making, before)
    try:
        with _Dispatch():
            yield
    finally:
        torch.tensor, torch.as_tensor = before


def moved_there(model, _device=THERE):
    """``model``, whose parameters and buffers are now elsewhere; within :func:`elsewhere`."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(Elsewhere(p.detach().clone()), requires_grad=p.requires_grad))
        for name, b in list(module.named_buffers(recurse=False)):
            setattr(module, name, Elsewhere(b.clone()))
    return model
