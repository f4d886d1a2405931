"""Hugging Face weights: which tensor is which (`families`, `links`), reading them (`source`, `encodings`), converting
both ways (`from_hf`, `to_hf`), and whether both sides compute the same (`parity`)."""
