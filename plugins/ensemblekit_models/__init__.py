"""The built-in base models, one file each; registered in pyproject.toml like anyone's."""
