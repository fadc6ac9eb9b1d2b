"""Built-in combiners of the members' outputs, one file each."""
