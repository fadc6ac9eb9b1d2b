"""Built-in losses beside those of the core, one file each."""
