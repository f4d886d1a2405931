from tests.poison import poisoned_memory

__all__ = ["poisoned_memory"]
