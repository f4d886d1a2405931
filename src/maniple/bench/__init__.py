"""Measurements of kernels beside their peers: `maniple bench`. What a figure says is stated in docs/benchmarks.md.

`shapes` what is measured · `operands` its tensors and whether a result is right · `ours`, `peers` what computes it ·
`timing`, `ceilings` how it is measured and what the device can do · `rows` a measurement as a record · `bars` what is
aimed at · `grouped_gemm` the run. Of the MoE layer: `layer_shapes`, `layer_operands`, `layer` (how one is run),
`layer_ours`, `layer_peers` · `moe_layer` the run. Of a whole training step: `step_ours`, `step_peer`, `step_trace`
(what a profile says) · `whole_step` the run. `convergence`: losses of precision recipes beside each other. Of a GPU,
for plans of it: `calibrate_work` what is measured · `calibrate` the run.
"""
