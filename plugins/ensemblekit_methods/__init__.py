"""The built-in ensembling methods, registered in pyproject.toml like those of any other package."""
