"""The low-precision linear layer on a GPU: products of the same numbers against fp64, quality, no host wait."""

from __future__ import annotations

import os

import pytest
import torch
from tests.gpu.test_low_precision import BOUND, BOUND_FP32, dtype
from tests.kernels.test_linear import case, exact
from tests.kernels.test_low_precision import snr, values
from tests.poison import poisoned_memory, relative_error  # noqa: F401 (a fixture for every test here)

from maniple.errors import UserError
from maniple.kernels import quantize, registry
from maniple.kernels.grouped_gemm import low_precision
from maniple.kernels.linear import OP, choose, quantized_linear, scaled_mm
from maniple.kernels.linear.grouped import Grouped
from maniple.kernels.quantize import QuantizedWeight, bump

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what the oracle's products need to be deterministic
RECIPES = ["fp8", "fp8_block", "mxfp8"]
SHAPES = [(1, 576, 7168), (260, 512, 1536), (131, 7168, 2048), (4096, 2880, 4096)]


def of(recipe: str) -> torch.dtype:
    return torch.float8_e4m3fn if recipe == "mxfp8" else dtype()


def on_gpu(*args, **settings):
    return [tensor.cuda() for tensor in case(*args, **settings)]


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@pytest.mark.parametrize("name", ["scaled_mm", "triton", "hopper"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_block"])
def test_products(recipe, name, rows, n, k):
    """Twice: the second meets recycled memory."""
    try:
        registry.candidates(OP if name == "scaled_mm" else low_precision.OP, recipe, "cuda", name)
    except UserError as error:
        pytest.skip(str(error))
    product = scaled_mm if name == "scaled_mm" else Grouped(recipe, name)
    x_SK, w_NK, bias_N, grad_SN = on_gpu(rows, k=k, n=n)
    ends_G = torch.tensor([rows], dtype=torch.int32, device="cuda")
    x, grad = (quantize.quantize_rows(t, ends_G, recipe, dtype=dtype()) for t in (x_SK, grad_SN))
    w = quantize.quantize_weight(w_NK[None], recipe, dtype=dtype())
    operands = grad.columnwise, x.columnwise, x.padded_ends_G
    dw_wanted = values(grad.columnwise)[:, :rows] @ values(x.columnwise)[:, :rows].t()
    for _ in range(2):
        out = product.rows(x.rowwise, w.forward, ends_G, bias_N=bias_N, out_dtype=torch.bfloat16)
        assert relative_error(out, values(x.rowwise) @ values(w.forward)[0].t() + bias_N.double()) <= 1.5 * BOUND
        dx = product.rows(grad.rowwise, w.dgrad, ends_G, out_dtype=torch.bfloat16)
        assert relative_error(dx, values(grad.rowwise) @ values(w.dgrad)[0].t()) <= BOUND
        assert relative_error(product.wgrad(*operands, out_dtype=torch.bfloat16)[0], dw_wanted) <= BOUND
        main_1NK = torch.full((1, n, k), 3.0, device="cuda")
        product.wgrad(*operands, out_dtype=torch.float32, out_1NK=main_1NK)
        assert relative_error(main_1NK[0], dw_wanted + 3) <= BOUND_FP32


@pytest.mark.parametrize("rms", [1.0, 1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("recipe", RECIPES)
def test_quality_at_any_magnitude(recipe, rms):
    x, w_NK, bias_N, grad = on_gpu(3, 50, k=512, n=384, rms=rms)
    leaves = [t.clone().requires_grad_() for t in (x, w_NK, bias_N)]
    for _ in range(2):
        out = quantized_linear(leaves[0], leaves[1], bias_N=leaves[2], recipe=recipe, dtype=of(recipe))
        got = torch.autograd.grad(out, leaves, grad)
    for a, b in zip((out, *got), exact(x, w_NK, grad, bias_N), strict=True):
        assert snr(a, b) >= 25


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("k", "n"), [(37, 66), (200, 136), (8, 1)])
def test_odd_shapes_are_the_oracle_s(recipe, k, n):
    x, w_NK, bias_N, grad = on_gpu(70, k=k, n=n)
    found = []
    for kernels in (None, "reference"):
        leaves = [t.clone().requires_grad_() for t in (x, w_NK, bias_N)]
        settings = {"recipe": recipe, "dtype": of(recipe), "kernels": kernels}
        out = quantized_linear(leaves[0], leaves[1], bias_N=leaves[2], **settings)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) <= 2 * BOUND


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_waits_for_nothing(recipe):
    x, w_NK, _, grad = on_gpu(260, k=512, n=384)
    leaf, weight = x.requires_grad_(), w_NK.requires_grad_()
    weight.main_grad = torch.zeros(384, 512, device="cuda")
    cache = QuantizedWeight(recipe, dtype=of(recipe))

    def step():
        out = quantized_linear(
            leaf, weight, recipe=recipe, dtype=of(recipe), weight_cache=cache, fuse_wgrad_accumulation=True
        )
        out.backward(grad)
        bump([weight])

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_oracle_is_the_last_resort():
    """On every GPU that has float8 kernels."""
    w_NK = torch.empty(384, 512, dtype=torch.bfloat16, device="cuda")
    if low_precision._no_float8() is not None:
        pytest.skip("this GPU multiplies no float8")
    for recipe in RECIPES:
        assert "reference" not in choose(w_NK, recipe, dtype=of(recipe))
    assert choose(w_NK, "fp8", dtype=of("fp8"))[0] == "scaled_mm"
