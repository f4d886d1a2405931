"""GPU cards: dense peaks, names that map to the right product or to none, and the CPU's stand-in for a peak."""

from __future__ import annotations

import time

import pytest

from maniple.errors import UserError
from maniple.hardware import GPU, list_gpus, load_gpu, lookup, measure_cpu_peak


@pytest.mark.parametrize(
    ("device_name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300-nvl72"),
        ("NVIDIA H800", "h800-sxm"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("AMD Instinct MI355X", "mi355x"),
        # Near names of other products, whose peaks differ:
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H20", None),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA GH200 480GB", None),
        ("AMD Instinct MI300A", None),
        ("AMD Instinct MI350X", None),
        ("AMD Radeon Graphics", None),
        ("NVIDIA GeForce RTX 5090", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_lookup(device_name, card):
    found = lookup(device_name)
    assert (found and found.name) == card


def test_peaks_are_dense_never_sparse():
    dense_bf16 = {
        "h100-sxm": 989e12,
        "h800-sxm": 989e12,
        "h200-sxm": 989e12,
        "b200": 2250e12,
        "gb200-nvl72": 2500e12,
        "b300": 2250e12,
        "gb300-nvl72": 2500e12,
        "mi300x": 1307e12,
        "mi325x": 1307e12,
        "mi355x": 2500e12,
    }
    assert {name: load_gpu(name).peak_flops("bf16") for name in list_gpus()} == dense_bf16
    assert lookup("NVIDIA H100 80GB HBM3").peak_flops() == 989e12  # 1979e12 is the figure with sparsity
    for name in list_gpus():
        gpu = load_gpu(name)
        assert gpu.peak_flops("fp8") == pytest.approx(2 * gpu.peak_flops("bf16"), rel=1e-3)


def test_formats():
    assert {name for name in list_gpus() if load_gpu(name).fp8_format == "fnuz"} == {"mi300x", "mi325x"}
    native = {"b200", "gb200-nvl72", "b300", "gb300-nvl72", "mi355x"}
    assert {name for name in list_gpus() if load_gpu(name).mxfp8_native} == native
    with pytest.raises(UserError, match="h200-sxm has no mxfp8"):
        load_gpu("h200-sxm").peak_flops("mxfp8")


def test_attained_is_apart_from_peaks_says_where_it_is_from_and_is_below_them():
    gpu = load_gpu("h200-sxm")
    assert gpu.attained is not None
    assert gpu.attained.tflops == {"bf16": 750, "fp8": 1278}
    assert "H200" in gpu.attained.provenance
    for dtype, tflops in gpu.attained.tflops.items():
        assert tflops * 1e12 < gpu.peak_flops(dtype)
    assert gpu.attained.memory_gb_per_s < gpu.memory_gb_per_s
    assert gpu.attained.link_gb_per_s < gpu.link.gb_per_s
    assert all(load_gpu(name).attained is None for name in list_gpus() if name != "h200-sxm")


def test_units():
    gpu = load_gpu("mi355x")
    assert gpu.memory_bytes == 309_200_000_000  # 287.98 GiB, as a device says
    assert gpu.memory_bytes_per_s == 8e12
    assert gpu.link_bytes_per_s == pytest.approx(7 * 76.8e9)
    assert gpu.scale_out_bytes_per_s == 400e9 / 8
    assert load_gpu("gb200-nvl72").gpus_per_node == load_gpu("gb300-nvl72").gpus_per_node == 72
    # 400 GB/s both ways where an H100 has 900; a NIC of 800 Gb/s
    assert load_gpu("h800-sxm").link_bytes_per_s == pytest.approx(load_gpu("h100-sxm").link_bytes_per_s * 4 / 9)
    assert load_gpu("b300").scale_out_bytes_per_s == load_gpu("gb300-nvl72").scale_out_bytes_per_s == 800e9 / 8


def test_unknown_card_gets_the_nearest():
    with pytest.raises(UserError, match="did you mean 'h200-sxm'"):
        load_gpu("H200")


def test_a_native_format_without_a_peak_is_refused():
    figures = load_gpu("h200-sxm").model_dump() | {"mxfp8_native": True}
    with pytest.raises(ValueError, match="go together"):
        GPU.model_validate(figures)


def test_cpu_peak_is_the_speed_of_a_product():
    torch = pytest.importorskip("torch")
    peak = measure_cpu_peak(0.1)
    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        torch.matmul(a, b)
        seconds.append(time.perf_counter() - start)
    # A loose band: other processes share the machine. It still tells FLOPs from multiply-adds of a wrong size.
    assert 2 * 1024**3 / min(seconds) == pytest.approx(peak, rel=0.6)
