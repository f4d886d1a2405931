"""Slow, plain programs that say what the fast ones must compute. They import nothing that they are compared with."""
