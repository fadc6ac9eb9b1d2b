"""The built-in ensembling methods, one file each; registered in pyproject.toml like anyone's."""
