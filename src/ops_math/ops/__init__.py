"""What is computed: one folder an operator family, with fixed file names."""
