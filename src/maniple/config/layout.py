"""Pipeline layouts: one short string that says which layers each pipeline stage holds.

    Et*3|(tt|)*29,m|L     32 stages: embedding and 3 layers, 29 times 2 layers, the MTP layer, the loss

`E` embedding · `t` transformer layer · `m` MTP layer · `L` loss and output head · `|` border between two stages ·
`x*n` and `(...)*n` repeat · commas mean nothing. Stage `s` is chunk `s // PP` of pipeline rank `s % PP`,
the order of the interleaved schedule (Narayanan et al., 2021).
"""

from __future__ import annotations

import re

from maniple.errors import UserError

_KINDS = "EtmL|"
_COUNT = re.compile(r"[1-9][0-9]{0,3}(?![0-9])")
_LONGEST = 20_000  # symbols after unrolling: far past any model, and short of exhausting memory


def parse_layout(text: str) -> list[str]:
    """The stages in order, each a string over `EtmL`, e.g. `Et|(tt|)*2mL` gives `["Et", "tt", "tt", "mL"]`.

    Raises UserError for a symbol it does not know, an unbalanced or nested bracket, a repeat without a
    count, or an empty stage.
    """
    stages = _unroll(text, text.replace(",", "")).split("|")
    if "" in stages:
        number = stages.index("") + 1
        raise _bad(text, f"stage {number} of {len(stages)} is empty; a stage holds at least one of E, t, m, L")
    return stages


def checked_layout(text: str, *, num_layers: int, num_mtp_layers: int, pipeline_size: int) -> list[str]:
    """The stages of a layout that builds each layer exactly once on `pipeline_size` ranks; UserError otherwise."""
    stages = parse_layout(text)
    flat = "".join(stages)
    if flat.count("E") != 1 or flat[0] != "E":
        raise _bad(text, "it needs exactly one E, first")
    if flat.count("L") != 1 or flat[-1] != "L":
        raise _bad(text, "it needs exactly one L, last")
    if flat.count("t") != num_layers:
        raise _bad(text, f"it holds {flat.count('t')} layers (t) and the model has {num_layers}")
    if flat.count("m") != num_mtp_layers:
        raise _bad(text, f"it holds {flat.count('m')} MTP layers (m) and the model has {num_mtp_layers}")
    if len(stages) % pipeline_size:
        raise _bad(text, f"its {len(stages)} stages do not divide over pipeline_parallel_size {pipeline_size}")
    if num_mtp_layers:
        if "t" in flat[flat.index("m") :]:
            raise _bad(text, "the MTP layers (m) come after every t")
        holders = [index for index, stage in enumerate(stages) if "m" in stage]
        if len(holders) > 1:
            raise _bad(text, "all MTP layers (m) belong in one stage")
        if holders[0] < len(stages) - pipeline_size:
            raise _bad(text, f"the MTP layers (m) belong in one of the last {pipeline_size} stages")
        if holders[0] and pipeline_size > 1 and holders[0] % pipeline_size == 0:
            # a rank would hold two copies of the embedding, of which the engine sums the gradient of one
            raise _bad(text, "the MTP layers (m) are on the first pipeline rank, in another stage than E: move them on")
    return stages


def _unroll(text: str, symbols: str, in_bracket: bool = False) -> str:
    """`symbols` without repeats; the inside of a bracket holds no bracket of its own."""
    out = ""
    at = 0
    while at < len(symbols):
        if symbols[at] == "(":
            close = symbols.find(")", at)
            inside = symbols[at + 1 : close]
            if close < 0:
                raise _bad(text, "a '(' is never closed")
            if in_bracket or "(" in inside:
                raise _bad(text, "brackets do not nest")
            item, at = _unroll(text, inside, in_bracket=True), close + 1
            if symbols[at : at + 1] != "*":
                raise _bad(text, "a bracket needs a count after it: (tt|)*29")
        elif symbols[at] in _KINDS:
            item, at = symbols[at], at + 1
        else:
            raise _bad(text, f"{symbols[at]!r} is no layer; it knows E embedding, t layer, m MTP, L loss, | border")
        if symbols[at : at + 1] == "*":
            count = _COUNT.match(symbols, at + 1)
            if count is None:
                raise _bad(text, "'*' needs a count of 1 to 9999 after it: t*3")
            item, at = item * int(count[0]), count.end()
        out += item
        if len(out) > _LONGEST:
            raise _bad(text, f"it unrolls to more than {_LONGEST} layers")
    return out


def _bad(text: str, why: str) -> UserError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    return UserError(f"parallel.pipeline_layout {shown!r}: {why}")
