"""Text and tokens: the demo corpus, tokenizers, `maniple data prepare`, and the datasets that training reads.

`prepare` (raw text to `.bin/.idx`) needs neither torch nor an engine; `datasets` is what a trainer calls.
"""
