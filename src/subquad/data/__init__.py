"""Data sets on disk: finding, unpacking, tokenising and caching them, and the datasets that tasks hand out."""
