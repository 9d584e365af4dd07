"""One file per mechanism; `base` is the contract, `registry` finds a mechanism by name."""
