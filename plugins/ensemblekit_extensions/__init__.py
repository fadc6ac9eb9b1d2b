"""The built-in extensions, one file each; registered in pyproject.toml like anyone's."""
