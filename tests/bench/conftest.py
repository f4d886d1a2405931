"""Operands of products and of layers, and ceilings that are not measured again for every run."""

from __future__ import annotations

import pytest
from tests.bench.small import CPU, SHAPE
from tests.bench.small_layers import CLAMPED, PLAIN

from maniple.bench import moe_layer
from maniple.bench.layer_operands import LayerOperands
from maniple.bench.operands import make


@pytest.fixture(scope="module")
def operands():
    return make(SHAPE, CPU, 0)


@pytest.fixture(scope="module", params=[PLAIN, CLAMPED], ids=["plain", "clamped"])
def either(request):
    return LayerOperands(request.param, CPU, 0)


@pytest.fixture(scope="module")
def plain():
    return LayerOperands(PLAIN, CPU, 0)


@pytest.fixture
def ceilings(monkeypatch):
    """Not measured again for every run."""
    found = moe_layer.attained.Ceilings({"bf16": 1e12, "fp8": 2e12, "mxfp8": 2e12}, 1e11)
    monkeypatch.setattr(moe_layer.attained, "measure", lambda *args, **kwargs: found)
    return found
