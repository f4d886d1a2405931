"""The mixture-of-experts layer, apart from any engine: router losses, dispatchers, experts, and their composition.

Shape suffixes: T tokens on this rank · D hidden · F expert intermediate · E all experts · G experts on this rank ·
K chosen a token · S slots of the expert-sorted buffer · B sequences · R expert-parallel ranks · X expert-tensor ranks.
"""
