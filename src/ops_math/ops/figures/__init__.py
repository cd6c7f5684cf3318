"""What is known of a tensor's values: a fingerprint of its bits, its size, counts, samples and a sketch, in one pass over it."""
