"""Matrix product with a weight, whose order of sums can be pinned."""
