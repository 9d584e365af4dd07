"""Training, comparing and using models: `subquad train`, `compare`, `eval`, `predict`, `generate`."""
