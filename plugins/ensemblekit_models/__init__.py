"""The built-in base models, registered in pyproject.toml like those of any other package."""
