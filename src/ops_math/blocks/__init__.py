"""The two lines a user writes: residual blocks that read the weights of modules they know and run the others as they are."""
