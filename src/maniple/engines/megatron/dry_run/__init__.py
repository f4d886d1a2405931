"""Jobs of any size without a GPU: one rank's memory (`one_rank`), all ranks' communication (`all_ranks`)."""
