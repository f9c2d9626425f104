"""The one recipe that makes an operator differentiable.

The library registers raw operators `<op>_fwd` and `<op>_bwd`, which know nothing of autograd. `define` makes the public
`<op>` over them, as a CompositeImplicitAutograd kernel: it is right under eager autograd, torch.compile, torch.export,
activation checkpointing and torch.func (grad, vjp, jacrev, vmap), and refuses in words what it cannot do (forward mode,
double backward).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

Tensors = tuple[torch.Tensor, ...]

_libraries: list[torch.library.Library] = []  # registrations live as long as their Library object


def library(namespace: str) -> torch.library.Library:
    """A handle for registering kernels of `namespace`, kept alive."""
    _libraries.append(torch.library.Library(namespace, "IMPL"))
    return _libraries[-1]


def define(
    namespace: str,
    name: str,
    *,
    num_outputs: int,
    forward: Callable[..., Tensors],
    backward: Callable[..., Tensors],
    gradients_of: Sequence[int],
    non_differentiable: Sequence[int] = (),
    same_gradient: Sequence[tuple[int, int]] = (),
) -> None:
    """Register `namespace::name` as differentiable.

    forward(*arguments, save)           calls the raw forward; its first `num_outputs` results are the operator's, the
                                        rest is kept for backward and need not be filled when `save` is False
    backward(*dout, *arguments, *kept)  calls the raw backward: the gradients of the arguments at positions
                                        `gradients_of`, in that order; an absent gradient of an output arrives as None
    non_differentiable                  positions of outputs that carry no gradient
    same_gradient                       pairs (position, source): an empty gradient at `position` means that it equals
                                        the one at `source`
    """

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Tensors:
            return backward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> None:
            raise RuntimeError(f"{name}: double backward is not supported")

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Tensors:
            return forward(*arguments, True)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.set_materialize_grads(False)
            kept = output[num_outputs:]
            ctx.mark_non_differentiable(*kept, *(output[i] for i in non_differentiable))
            ctx.constants = [None if isinstance(value, torch.Tensor) else value for value in inputs]
            tensors = [value if isinstance(value, torch.Tensor) else None for value in inputs]
            kept += tuple(output[i] for i in non_differentiable)
            ctx.save_for_backward(*tensors, *kept)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
            count = len(ctx.constants)
            saved = ctx.saved_tensors
            arguments = [constant if tensor is None else tensor for tensor, constant in zip(saved, ctx.constants)]
            douts = [grads[i] for i in range(num_outputs) if i not in non_differentiable]
            found = Backward.apply(*douts, *arguments, *saved[count:])
            results: list[torch.Tensor | None] = [None] * count
            for position, gradient in zip(gradients_of, found):
                if arguments[position] is not None:
                    results[position] = gradient
            for position, source in same_gradient:
                gradient = results[position]
                if gradient is not None and gradient.shape != arguments[position].shape:
                    results[position] = results[source]
            return tuple(results)

    # One name for each operator, so that profiles and error messages of autograd say which one it was.
    Forward.__name__ = Forward.__qualname__ = f"{name}_autograd"
    Backward.__name__ = Backward.__qualname__ = f"{name}_backward"

    def public(*arguments: Any) -> Any:
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise NotImplementedError(f"{name}: forward-mode differentiation is not supported")
        if torch._C._are_functorch_transforms_active():
            key = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
            include = torch._C._dispatch_tls_local_include_set()
            exclude = torch._C._dispatch_tls_local_exclude_set()
            with torch._C._ForceDispatchKeyGuard(include.add(key), exclude.remove(key)):
                return Forward.apply(*arguments)[:num_outputs]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return Forward.apply(*arguments)[:num_outputs]
        return forward(*arguments, False)[:num_outputs]

    defaults = _defaults(namespace, name)

    def kernel(*arguments: Any, **named: Any) -> Any:
        # The dispatcher leaves out trailing arguments that have their default value.
        complete = list(arguments) + defaults[len(arguments) :]
        return public(*complete)

    library(namespace).impl(name, kernel, "CompositeImplicitAutograd")


def _defaults(namespace: str, name: str) -> list[Any]:
    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    return [argument.default_value if argument.has_default_value() else None for argument in schema.arguments]


def define_autocast(namespace: str, name: str, positions: Sequence[int]) -> None:
    """Under autocast, cast the tensors at `positions` to the autocast dtype; others, and float64, stay as they are."""
    operator = getattr(getattr(torch.ops, namespace), name)
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):

        def kernel(*arguments: Any, device: str = device, key: str = key) -> Any:
            dtype = torch.get_autocast_dtype(device)
            cast = [
                value.to(dtype) if i in positions and isinstance(value, torch.Tensor) and _castable(value) else value
                for i, value in enumerate(arguments)
            ]
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
                return operator(*cast)

        library(namespace).impl(name, kernel, key)


def _castable(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
