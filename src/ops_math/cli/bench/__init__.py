"""`ops-math bench`: every operator and whole steps against plain PyTorch and its rivals, interleaved in one run."""
