"""The documentation site: `make docs` runs `python tools/docsite OUT`. See `build`."""
