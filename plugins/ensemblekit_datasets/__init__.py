"""The built-in data sets, registered in pyproject.toml like those of any other package."""
