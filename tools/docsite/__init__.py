"""The documentation site: `make docs` runs `python -m docsite OUT`. See `build`."""
