"""The built-in mixtures of training samples, one file each."""
