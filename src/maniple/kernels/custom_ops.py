"""Operators of ours that PyTorch knows by name (`torch.ops.maniple.*`), for what looks at operators.

Compiled graphs, exported programs, fake and meta tensors and dispatch modes (selective recomputation, recorders) see
one operator with a schema, where kernels would be opaque to them. In plain eager mode the public functions call the
kernels themselves, since a named operator costs the host tens of microseconds more: `named` says which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_LIBRARY = torch.library.Library("maniple", "FRAGMENT")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Adds the operator `maniple::<schema>`. `fake` makes results of the right shapes, without values."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"maniple::{name}", fake, lib=_LIBRARY)


def differentiate(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Gives `maniple::<name>` its gradient, as the two functions of a `torch.autograd.Function`."""
    torch.library.register_autograd(f"maniple::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def named(tensor: torch.Tensor) -> bool:
    """Whether the named operator is to be called: there is someone to see it, or the tensor has no values."""
    return (
        torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or tensor.is_meta or isinstance(tensor, FakeTensor)
    )
