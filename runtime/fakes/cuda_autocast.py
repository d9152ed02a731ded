"""Autocast on fake tensors as CUDA has it: which operations cast, and to which type.

[Note: Lists of operations]
``torch.autocast`` knows for every operation whether it computes in the narrow type, in float32, or in the widest type
that it is given, and the lists of CPU and CUDA differ: a softmax or a normalization stays narrow on the CPU and becomes
float32 on CUDA, an operation that the CPU's list widens runs on CUDA as it is.  Fake tensors lie on the CPU, so a
model that is to train on a GPU would be traced as it never runs there.  Meanwhile the CPU's rules are exchanged for
CUDA's.  Products that both lists make narrow keep torch's own rule, with its cache of casts.  Casts to the narrow type
that only CUDA's list has (a cell of a recurrent network, ``prelu``) are cached here, until autocast lets go of its own.
Source of the lists: torch/include/ATen/autocast_mode.h (AT_FORALL_...) and aten/src/ATen/autocast_mode.cpp of torch
2.13; a test compares every rule with torch's own for CUDA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map

from ...shared.basics.errors import WorkloadError
from ..model.nested_tensors import tensors_in

_KEY: Final = "AutocastCPU"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NARROW: Final = _names(
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
)
"""Operations that compute in autocast's type."""
FLOAT32: Final = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
"""Operations whose arguments become float32."""
FLOAT32_RESULT: Final = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
"""Operations that are asked for a result in float32, unless another type is asked for."""
NORMS: Final = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Norms, and the ones that give float32 in their place."""
WIDEST: Final = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Operations whose arguments become the widest type among them."""
REFUSED: Final = ("binary_cross_entropy",)

"""Operations that raise within autocast."""

_Rule = Callable[..., Any]


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Within autocast on CUDA or on the CPU: let fake tensors on the CPU be cast as CUDA casts its own."""
    kind = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    if kind is None:
        yield
        return
    dtype, is_cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    with cuda_autocast(), torch.autocast("cpu", dtype=dtype, cache_enabled=is_cached):
        yield


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let ``torch.autocast`` on the CPU follow CUDA's lists within the block; see [Note: Lists of operations]."""
    casts = _NarrowCasts()
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, rule in _rules(casts).items():
            library.impl(name, rule, _KEY)  # type: ignore[no-untyped-call]
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        casts.clear()

    # torch's own contexts end by this name.
    torch.clear_autocast_cache = clear_both
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear
        library._destroy()  # type: ignore[no-untyped-call]


def _rules(casts: _NarrowCasts) -> dict[str, _Rule]:
    """By operator: what autocast does instead of the CPU's rule."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(_KEY)
    on_cpu = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    rules = dict.fromkeys(on_cpu, torch.library.fallthrough_kernel)
    for name in NARROW:
        if name in on_cpu:
            del rules[name]  # torch's own rule is the same, cache of casts and all
        else:
            rules[name] = partial(_narrowed, _operator(name), casts)
    rules |= {name: partial(_cast, _operator(name), torch.float32) for name in FLOAT32}
    rules |= {name: partial(_with_float32_result, _operator(name)) for name in FLOAT32_RESULT}
    rules |= {name: partial(_with_dtype, _operator(name), _operator(wide)) for name, wide in NORMS.items()}
    rules |= {name: partial(_widest, _operator(name)) for name in WIDEST}
    return rules | dict.fromkeys(REFUSED, _refused)


def _operator(name: str) -> Any:
    """The operator called ``name`` within aten."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_eligible(value: Any) -> bool:
    """Whether autocast touches it."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _narrow() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _to(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if _is_eligible(value) else value


class _NarrowCasts:
    """Casts of weights, each made once, as torch's own cache has them."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By address of the weight, which is held so that no other tensor gets it."""

    def clear(self) -> None:
        """Let go of all."""
        self._made.clear()

    def cast(self, value: Any) -> Any:
        """The value in autocast's type, if autocast touches it."""
        narrow = _narrow()
        if not _is_eligible(value) or value.dtype is narrow:
            return value
        is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not is_weight or not torch.is_autocast_cache_enabled():
            return value.to(narrow)
        if id(value) not in self._made:
            self._made[id(value)] = value, value.to(narrow)
        return self._made[id(value)][1]


def _narrowed(operator: Any, casts: _NarrowCasts, *args: Any, **kwargs: Any) -> Any:
    with torch._C._DisableAutocast():
        return operator(*tree_map(casts.cast, args), **tree_map(casts.cast, kwargs))


def _cast(operator: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    to = partial(_to, dtype)
    with torch._C._DisableAutocast():
        return operator(*tree_map(to, args), **tree_map(to, kwargs))


def _widest(operator: Any, *args: Any, **kwargs: Any) -> Any:
    is_wide = any(t.dtype is torch.float32 for t in tensors_in((args, kwargs)) if _is_eligible(t))
    return _cast(operator, torch.float32 if is_wide else _narrow(), *args, **kwargs)


def _with_float32_result(operator: Any, *args: Any, **kwargs: Any) -> Any:
    place = [argument.name for argument in operator._schema.arguments].index("dtype")
    is_open = kwargs.get("dtype") is None if len(args) <= place else args[place] is None
    if is_open and _is_eligible(args[0]):
        args, kwargs = args[:place], kwargs | {"dtype": torch.float32}
    with torch._C._DisableAutocast():
        return operator(*args, **kwargs)


def _with_dtype(operator: Any, wide: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._DisableAutocast():
        if not _is_eligible(args[0]):
            return operator(*args, **kwargs)
        names = [argument.name for argument in operator._schema.arguments]
        defaults = {argument.name: argument.default_value for argument in operator._schema.arguments[len(args) :]}
        given = dict(zip(names, args, strict=False)) | {name: defaults[name] for name in names[len(args) :]} | kwargs
        return wide(*(given[name] for name in names), dtype=torch.float32)


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise WorkloadError(
        "binary_cross_entropy cannot run within autocast on CUDA: torch refuses it there. Let the model give logits, "
        "and use torch.nn.functional.binary_cross_entropy_with_logits."
    )
