"""The operations of a mixture-of-experts layer. One folder an op: `reference.py` is its oracle, in plain torch.

Importing this package fills the registry (`registry.py`), through which the public function of each op finds the
implementation that runs. Every op keeps the grouped-rows contract:

- rows are sorted by local expert; `ends_G` int32 on the device holds the inclusive prefix ends of the groups;
- rows at or past `ends_G[-1]` (the tail) may hold anything on input, NaN too, and never reach a result; on output they
  are undefined unless `zero_tail=True`;
- an empty group is legal and its weight gradients are exactly zero;
- the same inputs give the same bits.

Shape suffixes: T tokens on this rank · D hidden · F expert intermediate · E all experts · G experts on this rank ·
K chosen a token · S slots of the expert-sorted buffer (static) · B sequences. GEMMs say S, K (summed) and N.
"""

from maniple.kernels import adamw, grouped_gemm, linear, pages, permute, quantize, routing, swiglu

__all__ = ["adamw", "grouped_gemm", "linear", "pages", "permute", "quantize", "routing", "swiglu"]
