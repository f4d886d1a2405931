"""Training engines: each folder joins MoE layer and cards to one framework, through that framework's own seams."""
