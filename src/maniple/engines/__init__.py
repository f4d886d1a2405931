"""Training engines: each folder joins the MoE layer and the cards to one framework, through that framework's own seams."""
