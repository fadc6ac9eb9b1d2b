"""The built-in data sets, one file each; registered in pyproject.toml like anyone's."""
