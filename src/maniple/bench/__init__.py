"""Measurements of kernels beside their peers: `maniple bench`. What a figure says is stated in docs/benchmarks.md.

`shapes` what is measured · `operands` its tensors and whether a result is right · `ours`, `peers` what computes it ·
`timing`, `ceilings` how it is measured and what the device can do · `rows` a measurement as a record · `bars` what is
aimed at · `grouped_gemm` the run.
"""
